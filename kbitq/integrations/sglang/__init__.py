"""kbitq for SGLang: its servers know the format once kbitq is installed (docs/serving.md).

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins`` and calls it in each of its processes. Nothing
of SGLang is imported before that.
"""


def register() -> None:
    """Make ``quant_method: kbitq`` known to SGLang; a second call changes nothing."""
    from sglang.srt.layers import quantization

    from kbitq.format import QUANT_METHOD
    from kbitq.integrations.sglang.config import KbitqSglangConfig

    # SGLang has no function for it. Others hold these same objects, so they are filled and not replaced.
    for name in ("QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
        getattr(quantization, name, {})[QUANT_METHOD] = KbitqSglangConfig
