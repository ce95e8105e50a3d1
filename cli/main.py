"""The program ``kbitq``: registers the commands and holds the one try/except. It decides nothing."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import typer

from kbitq.cli.commands import COMMANDS
from kbitq.cli.console import console
from kbitq.cli.errors import INTERRUPTED, Terminated, report, stop
from kbitq.cli.options.parsing import examples
from kbitq.cli.options.printing import Version

app = typer.Typer(
    name="kbitq",
    help="Quantize any safetensors checkpoint to 2..8 bits a weight: fast, exact, without calibration data.",
    epilog=examples(
        "kbitq quantize model.safetensors --k 3",
        "kbitq inspect model-kbitq-k3.safetensors",
        "kbitq dequantize model-kbitq-k3.safetensors -o restored.safetensors",
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, _module in COMMANDS.items():
    app.command(_name, epilog=_module.EPILOG)(_module.command)


@app.callback()
def _root(version: Version = False) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program on ``arguments`` (default: those of the process) and return its exit code.

    0: done. 1: an error, told in a sentence on stderr. 2: the command line was not understood. 130 and 143: stopped by
    Ctrl-C or SIGTERM, with everything unfinished removed.
    """
    console.reset()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        code = app(args=arguments, prog_name="kbitq", standalone_mode=False)
        if code == INTERRUPTED:  # Typer turns Ctrl-C into this code without a word
            raise KeyboardInterrupt
        console.flush()
        return code or 0
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return report(error)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    raise SystemExit(run())
