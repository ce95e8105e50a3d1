"""``kbitq run``: any Python program, with the format known to transformers."""

from __future__ import annotations

from kbitq.cli.console import console
from kbitq.cli.options import arguments, parsing, running
from kbitq.cli.options.printing import Debug
from kbitq.cli.programs import Program, find

EPILOG = parsing.examples(
    "kbitq run lm_eval --model hf --model_args pretrained=./llama-k4 --tasks arc_easy",
    "kbitq run train.py --model ./llama-k4",
    "kbitq run -m package.module ARGS",
)
SETTINGS = {"allow_interspersed_args": False}  # what follows PROGRAM is its own


def command(
    program: arguments.ProgramName,
    given: arguments.ProgramArguments = None,
    module: running.Module = False,
    debug: Debug = False,
) -> Program:
    """Run a Python program in which transformers can load what kbitq quantized.

    Options of kbitq stand before PROGRAM, all that follows is the program's.
    Exit code and signals are the program's, too.
    """
    console.begin(debug=debug)
    return find(program, given or [], module=module)
