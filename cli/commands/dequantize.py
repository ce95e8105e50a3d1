"""``kbitq dequantize``: back to an ordinary checkpoint."""

from __future__ import annotations

from kbitq.cli.console import console
from kbitq.cli.options import arguments, output, parsing
from kbitq.cli.options.printing import Printing
from kbitq.cli.options.signature import spread

EPILOG = parsing.examples(
    "kbitq dequantize model-kbitq-k3.safetensors -o restored.safetensors",
    "kbitq dequantize ./llama-k4 -o ./llama-restored --dtype bfloat16",
    "kbitq dequantize llama-Q4_K_M.gguf -o ./llama-bf16 --dtype bfloat16",
)


@spread
def command(
    path: arguments.Quantized,
    output: output.RequiredOutput,
    dtype: output.Dtype = None,
    force: output.Force = False,
    *,
    talk: Printing,
) -> None:
    """Turn a quantized checkpoint back into an ordinary one that any tool loads: kbitq's, or another tool's format.

    Names and shapes are those of the source, and so are the dtypes unless --dtype is given.
    """
    console.begin(**vars(talk), unfinished="nothing is under the final name")
    from kbitq.checkpoint import dequantize_checkpoint
    from kbitq.cli import sources
    from kbitq.cli.views import summary

    target = sources.local(path)

    with console.progress("dequantizing") as progress:
        report = dequantize_checkpoint(target, output, dtype=dtype, force=force, progress=progress)
    summary.restored(report)
