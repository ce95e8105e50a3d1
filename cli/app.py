"""The program as Typer knows it: the commands, registered."""

from __future__ import annotations

import typer

from kbitq.cli.commands import COMMANDS
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
    app.command(_name, epilog=_module.EPILOG, context_settings=getattr(_module, "SETTINGS", None))(_module.command)


@app.callback()
def _root(version: Version = False) -> None:
    pass
