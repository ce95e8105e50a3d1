"""``kbitq dequantize``: back to an ordinary checkpoint."""

from __future__ import annotations

from kbitq.cli.console import console
from kbitq.cli.options import arguments as options

EPILOG = options.examples(
    "kbitq dequantize model-kbitq-k3.safetensors -o restored.safetensors",
    "kbitq dequantize ./llama-k4 -o ./llama-restored --dtype bfloat16",
)


def command(
    path: options.Quantized,
    output: options.RequiredOutput,
    dtype: options.Dtype = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Turn a quantized checkpoint back into an ordinary one that any tool loads.

    Names and shapes are those of the source, and so are the dtypes unless --dtype is given.
    """
    console.begin(wants_json=json, quiet=quiet, debug=debug)
    from kbitq.checkpoint import dequantize_checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import summary

    target = sources.find(path).place

    with console.progress("dequantizing") as progress:
        report = dequantize_checkpoint(target, output, dtype=dtype, force=force, progress=progress)
    summary.restored(report)
