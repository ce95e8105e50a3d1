"""kbitq is a guest in torch, transformers and PEFT: it registers where they offer it, and changes nothing else."""

import textwrap

import pytest

from helpers import fresh

pytest.importorskip("peft", reason="peft is not installed")

SNAPSHOT = '''
import importlib, sys

HOSTS = ("torch", "transformers", "peft")
for name in ("torch.nn.utils", "transformers.modeling_utils", "transformers.quantizers.auto", "transformers.trainer",
             "transformers.core_model_loading", "transformers.models.llama.modeling_llama", "peft.tuners.lora.model",
             "transformers.integrations.peft", "torch.library", "torch.nn.modules.lazy"):
    importlib.import_module(name)

def modules():
    return {n: m for n, m in sys.modules.items() if n.split(".")[0] in HOSTS and m is not None}

def is_value(value):
    """Numbers, texts and the like: state, which work may change."""
    return isinstance(value, (int, float, str, bytes, type(None)))

def is_class(value):
    return issubclass(type(value), type)  # not isinstance, which asks proxies

def members(owner):
    return {n: v for n, v in list(vars(owner).items()) if not is_value(v)}

def snapshot(known):
    """Every attribute of every module and of every class that stands in it, and the entries of tables."""
    seen = {}
    for where, module in known.items():
        for name, value in members(module).items():
            seen[where, name] = value
            if type(value) is dict and not name.startswith("_"):
                seen.update({(where, name, key): entry for key, entry in list(value.items()) if isinstance(key, str)})
            if is_class(value) and value.__module__ == where:
                seen.update({(where, name, n): v for n, v in members(value).items()})
    return seen

def origin(value):
    module = getattr(value, "__module__", None)
    return module.split(".")[0] if isinstance(module, str) else None

def differences(before, after):
    """What was replaced, and what others than the hosts added to a class, or kbitq to anything else."""
    found = set()
    for where, value in after.items():
        if where not in before:
            in_class = len(where) == 3 and is_class(before.get(where[:2])) and where[2] != "__slotnames__"  # of copyreg
            if (in_class and origin(value) not in HOSTS) or origin(value) == "kbitq":
                found.add(where)
        elif before[where] is not value:
            found.add(where)
    return found | (before.keys() - after.keys())

known, meta_path = modules(), list(sys.meta_path)
before = snapshot(known)
'''

WORK = """
import kbitq, kbitq.nn, kbitq.integrations.peft, kbitq.integrations.transformers.saving, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoModelForCausalLM
kbitq.KbitqConfig(k=3)
model = AutoModelForCausalLM.from_pretrained({folder!r})
assert type(model.model.layers[0].mlp.up_proj) is kbitq.nn.KbitLinear
from peft import LoraConfig, get_peft_model
config = kbitq.integrations.peft.for_packed(LoraConfig(target_modules=["up_proj"]))
model = get_peft_model(model, config)
model(input_ids=torch.arange(8)[None])
kbitq.integrations.peft.merge(model, 5)
"""

REGISTERED = {
    ("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING", "kbitq"),
    ("transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING", "kbitq"),
    ("transformers.quantizers.auto", "LOADING_ATTRIBUTES_CONFIG_TYPES"),
    ("torch._weights_only_unpickler", "_marked_safe_globals_set"),
}
"""All that kbitq adds to its hosts: two entries of tables, a tuple that is longer by one, and by
``torch.serialization.add_safe_globals`` the class of a quantized tensor."""


def run(code: str) -> fresh.Finished:
    return fresh.run("-c", code)


def test_nothing_but_the_tables_of_quantizers_changes(folders) -> None:
    folder = str(folders("llama", 3)[1])
    done = run(SNAPSHOT + WORK.format(folder=folder) + textwrap.dedent(f"""
        found = differences(before, snapshot(known))
        assert found == {REGISTERED!r}, sorted(found ^ {REGISTERED!r})
        assert sys.meta_path == meta_path, sys.meta_path
        auto = sys.modules["transformers.quantizers.auto"]
        assert [c.__name__ for c in auto.LOADING_ATTRIBUTES_CONFIG_TYPES].count("KbitqConfig") == 1
    """))  # fmt: skip
    assert done.returncode == 0, done.stderr


CHANGES = """
import peft, torch
from transformers import PreTrainedModel
PreTrainedModel.dtype = property(lambda self: None)
PreTrainedModel.news = property(lambda self: None)
torch.nn.functional.linear = lambda *a: None
peft.LoraConfig.__post_init__ = lambda self: None
"""


def test_the_comparison_sees_changes() -> None:
    done = run(SNAPSHOT + CHANGES + "for where in differences(before, snapshot(known)): print(where)")
    assert set(done.stdout.splitlines()) == {
        "('transformers.modeling_utils', 'PreTrainedModel', 'dtype')",
        "('transformers.modeling_utils', 'PreTrainedModel', 'news')",
        "('torch.nn.functional', 'linear')",
        "('peft.tuners.lora.config', 'LoraConfig', '__post_init__')",
    }, done.stderr


def test_the_hook_leaves_when_its_work_is_done() -> None:
    done = run(textwrap.dedent("""
        import sys
        before = list(sys.meta_path)
        import kbitq
        assert len(sys.meta_path) == len(before) + 1
        import importlib.util
        spec = importlib.util.find_spec("transformers.quantizers.auto")  # imports the packages above it only
        assert spec is None or spec.origin.endswith("auto.py")
        import transformers.quantizers.auto as auto
        ours = [finder for finder in sys.meta_path if type(finder).__module__.startswith("kbitq")]
        assert ours == [], ours
        for loader in (auto.__loader__, auto.__spec__.loader):
            assert type(loader).__name__ == "SourceFileLoader" and "exec_module" not in vars(loader), loader
        import inspect
        assert "register_quantizer" in inspect.getsource(auto)
        assert "kbitq" in auto.AUTO_QUANTIZER_MAPPING
    """))  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_failed_import_is_tried_again(tmp_path) -> None:
    """The module of the host fails once; kbitq still waits for it."""
    (tmp_path / "host.py").write_text("import os\nif os.environ.pop('FAIL', None): raise RuntimeError('once')\n")
    done = run(textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from kbitq.integrations.import_hook import after_import
        ran = []
        after_import("host", lambda: ran.append(1))
        after_import("host", lambda: ran.append(2))
        os.environ["FAIL"] = "1"
        try:
            import host
        except RuntimeError:
            pass
        assert ran == []
        import host
        assert ran == [1], ran
        after_import("host", lambda: ran.append(3))
        assert ran == [1, 3]
    """))  # fmt: skip
    assert done.returncode == 0, done.stderr
