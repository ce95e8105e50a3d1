"""kbitq for vLLM: ``vllm serve FOLDER`` knows the format once kbitq is installed (docs/serving.md).

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Nothing
of vLLM is imported before that.
"""


def register() -> None:
    """Make ``quant_method: kbitq`` known to vLLM; a second call changes nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from kbitq.format import QUANT_METHOD
    from kbitq.integrations.vllm.config import KbitqVllmConfig

    register_quantization_config(QUANT_METHOD)(KbitqVllmConfig)
