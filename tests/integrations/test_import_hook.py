"""Registration: whatever is imported first, cheaply, once, and without breaking others."""

import subprocess
import sys
import textwrap

import pytest

from helpers import fresh


def run(code: str) -> fresh.Finished:
    strict = "import warnings; warnings.filterwarnings('error', category=UserWarning, module='kbitq')\n"
    return fresh.run("-c", strict + textwrap.dedent(code))


ORDERS = {
    "kbitq first": "import kbitq, transformers",
    "transformers first": "import transformers, kbitq",
    "after the registry": "import transformers.quantizers.auto; import kbitq",
    "after a model class": "from transformers import LlamaForCausalLM; import kbitq",
    "config first": "import kbitq; kbitq.KbitqConfig",
    "config after transformers": "import transformers, kbitq; kbitq.KbitqConfig",
    "quantizer first": "import kbitq.integrations.transformers.quantizer",
    "saving first": "import kbitq; kbitq.save_pretrained",
    "twice": "import kbitq, importlib, transformers.quantizers; importlib.reload(kbitq); import kbitq.nn",
}


@pytest.mark.parametrize("order", ORDERS)
def test_either_order_registers(order: str) -> None:
    done = run(f"""
        {ORDERS[order]}
        from transformers.quantizers import auto
        assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["kbitq"] is kbitq.KbitqConfig
        assert auto.AUTO_QUANTIZER_MAPPING["kbitq"].__module__ == "kbitq.integrations.transformers.quantizer"
        from transformers.quantizers import AutoQuantizationConfig
        assert AutoQuantizationConfig.from_dict({{"quant_method": "kbitq", "k": 3}}).k == 3
    """)
    assert done.returncode == 0, done.stderr


def test_importing_kbitq_imports_neither() -> None:
    heavy = {"torch", "transformers", "numpy", "peft", "accelerate", "safetensors"}
    code = f"import sys, kbitq; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_hook_lets_other_imports_be() -> None:
    done = run("""
        import sys, kbitq
        try:
            import transformers.no_such_module
        except ModuleNotFoundError as error:
            assert error.name == "transformers.no_such_module"
        import importlib.util
        assert importlib.util.find_spec("json") is not None
        assert importlib.util.find_spec("no_such_package") is None
    """)
    assert done.returncode == 0, done.stderr


def test_a_failure_to_register_is_a_warning_and_not_an_error() -> None:
    done = run("""
        import sys, types, warnings, kbitq
        sys.modules["kbitq.integrations.transformers.quantizer"] = None      # importing it fails
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import transformers.quantizers.auto as auto
        assert "kbitq" not in auto.AUTO_QUANTIZER_MAPPING
        assert any("could not register" in str(w.message) for w in caught), caught
    """)
    assert done.returncode == 0, done.stderr


def test_a_transformers_that_is_too_old_is_said_to_be() -> None:
    done = run("""
        import warnings, kbitq, transformers
        transformers.__version__ = "4.57.6"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import transformers.quantizers.auto as auto
        said = [str(w.message) for w in caught if "could not register" in str(w.message)]
        assert said == ["kbitq could not register itself with transformers: transformers 4.57.6 is too old for kbitq: "
                        "pip install 'transformers>=5.17'"], said
    """)
    assert done.returncode == 0, done.stderr
