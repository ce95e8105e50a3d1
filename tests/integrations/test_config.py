"""``KbitqConfig``: each documented use in a process of its own, and options that there are not."""

import json
import textwrap

import pytest
import torch

import kbitq
from helpers import fresh
from helpers.small_models import auto_class
from kbitq.errors import OptionError

KBITQ_FIRST = "import kbitq\nfrom transformers import AutoModelForCausalLM"
TRANSFORMERS_FIRST = "from transformers import AutoModelForCausalLM\nimport kbitq"
LOAD = "model = AutoModelForCausalLM.from_pretrained"
USES = {
    "packed": (KBITQ_FIRST, LOAD + "({folder!r})"),
    "decoded": (KBITQ_FIRST, LOAD + "({folder!r}, quantization_config=kbitq.KbitqConfig(dequantize=True))"),
    "on the fly": (KBITQ_FIRST, LOAD + "({source!r}, quantization_config=kbitq.KbitqConfig(k=3))"),
    "decoded, transformers first": (
        TRANSFORMERS_FIRST, LOAD + "({folder!r}, quantization_config=kbitq.KbitqConfig(dequantize=True))",
    ),
    "on the fly, transformers first": (
        TRANSFORMERS_FIRST, LOAD + "({source!r}, quantization_config=kbitq.KbitqConfig(k=3))",
    ),
}  # fmt: skip


STRICT = """import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
"""


@pytest.mark.parametrize("use", USES)
def test_a_use_as_documented_in_a_fresh_process(use: str, folders) -> None:
    source, folder = folders("llama", 3)
    first, load = USES[use]
    code = f"{first}\n{load.format(source=str(source), folder=str(folder))}\n" + textwrap.dedent("""
        up = model.model.layers[0].mlp.up_proj
        print(type(up).__name__, getattr(up, "k", None), model.dtype)
    """)
    done = fresh.run("-c", STRICT + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*(["Linear", "None"] if "decoded" in use else ["KbitLinear", "3"]), "torch.bfloat16"]


COMMAND = "run `kbitq quantize --{}` and load the folder that it writes"
REFUSED = {
    "bits": ({"bits": 4}, "KbitqConfig has no option 'bits': did you mean 'k'?"),
    "k and bpw": ({"k": 4, "bpw": 3.5}, "k and bpw do not go together: bpw=3.5 chooses a K for each weight"),
    "bpw": ({"bpw": "3"}, "bpw must be a number, not '3'"),
    "size": ({"size": "3GB"}, "KbitqConfig has no option 'size': " + COMMAND.format("size 3GB")),
    "a rule": ({"rule": "*=k4"}, "KbitqConfig has no option 'rule': did you mean 'rules'?"),
    "rules": ({"rules": "*=k4"}, "rules must be a list of strings such as '*.down_proj.weight=k4', not '*=k4'"),
    "rules that are none": ({"rules": ["*=kk"]}, "rule '*=kk' is not understood"),
    "levels and bpw": (
        {"bpw": 3, "codebook": [-1.0, 1.0]}, "codebook must have a name where bpw chooses K: levels are for one K",
    ),
    "both": (
        {"importance": "a", "calibration": "b"},
        "importance and calibration do not go together: error feedback has weights of its own",
    ),
    "path": ({"calibration": 3}, "calibration must be a path, not 3"),
    "auto": (
        {"codec": "auto"}, "codec must be one of planes, trellis, trellis/128, not 'auto' (auto needs bpw)",
    ),
    "scale block": ({"codec": "planes", "scale_block": 128}, "scale_block of the codec planes cannot be 128"),
    "typo": ({"exlude": ["*"]}, "KbitqConfig has no option 'exlude': did you mean 'exclude'?"),
    "another's": ({"ignore": []}, "KbitqConfig has no option 'ignore': did you mean 'modules_to_not_convert'?"),
    "unknown": (
        {"zero_point": True},
        "KbitqConfig has no option 'zero_point': it has k, scale, codebook, codec, scale_block, bpw, "
        "rules, importance, calibration, include, exclude, keep_embeddings, modules_to_not_convert and dequantize",
    ),
    "k too high": ({"k": 9}, "k must be a whole number from 2 to 8, not 9"),
    "k as text": ({"k": "4"}, "k must be a whole number from 2 to 8, not '4'"),
    "k between": (
        {"k": 3.5}, "k must be a whole number from 2 to 8, not 3.5: for an average, bpw=3.5",
    ),
    "codec": ({"codec": "plane"}, "codec must be one of planes, trellis, trellis/128, not 'plane'"),
    "scale": ({"scale": "max"}, "scale must be 'mse' or 'absmax', not 'max'"),
    "fit-shared": (
        {"codebook": "fit-shared"},
        "codebook 'fit-shared' takes many weights at a time: " + COMMAND.format("codebook fit-shared"),
    ),
    "codebook": ({"codebook": "optimall"}, "codebook optimall: neither nf or optimal nor a .json or .safetensors file"),
    "levels": ({"k": 2, "codebook": [-1.0, 1.0]}, "the codebook: K=2 takes 4 levels, there are 2"),
    "pattern": ({"include": "*.weight"}, "include must be a list of strings, not '*.weight'"),
    "patterns": ({"exclude": [3]}, "exclude must be a list of strings, not [3]"),
    "modules": ({"modules_to_not_convert": "a"}, "modules_to_not_convert must be a list of strings, not 'a'"),
    "switch": ({"dequantize": "yes"}, "dequantize must be True or False, not 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_that_there_is_not_ends_in_one_sentence(case: str) -> None:
    options, sentence = REFUSED[case]
    for make in (
        lambda: kbitq.KbitqConfig(**options),
        lambda: kbitq.KbitqConfig.from_dict({"quant_method": "kbitq", **options}),
    ):
        with pytest.raises(kbitq.KbitqError) as caught:
            make()
        assert str(caught.value) == sentence


def test_options_are_kept() -> None:
    options = {
        "k": 5, "scale": "absmax", "codebook": "nf", "include": ["a"], "exclude": ["b"], "keep_embeddings": False,
        "modules_to_not_convert": ["c"], "rules": ["*.a.weight=k4,codebook=nf"], "calibration": "stats",
    }  # fmt: skip
    config = kbitq.KbitqConfig(**options)
    told = json.loads(config.to_json_string())
    assert told == {"quant_method": "kbitq", **options}
    assert kbitq.KbitqConfig.from_dict(told).to_dict() == config.to_dict()
    levels = [-1.0, -0.25, 0.25, 1.0]
    assert kbitq.KbitqConfig(k=2, codebook=torch.tensor(levels)).to_dict()["codebook"] == levels


def test_what_a_folder_says_beside_the_format_is_ignored(folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"bits": 4, "written_by": "a later version", "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    model = auto_class("llama").from_pretrained(tmp_path)
    assert model.model.layers[0].mlp.up_proj.k == 3
    assert model.config.quantization_config.to_dict() == config["quantization_config"]


def test_a_folder_without_a_version_is_an_error(folders, tmp_path) -> None:
    _, folder = folders("llama", 3)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["format_version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(kbitq.KbitqError, match="format_version None"):
        auto_class("llama").from_pretrained(tmp_path)


def test_options_as_a_dict(folders) -> None:
    source, _ = folders("llama", 3)
    given = {"quant_method": "kbitq", "k": 5}
    assert auto_class("llama").from_pretrained(source, quantization_config=given).model.layers[0].mlp.up_proj.k == 5
    with pytest.raises(OptionError, match="no option 'bits'"):
        auto_class("llama").from_pretrained(source, quantization_config={"quant_method": "kbitq", "bits": 5})


def test_a_codebook_fitted_to_each_weight(folders) -> None:
    source, folder = folders("llama", 3, codebook="fit")
    model = auto_class("llama").from_pretrained(source, quantization_config=kbitq.KbitqConfig(k=3, codebook="fit"))
    stored = kbitq.load_file(folder)
    for layer in range(2):
        q = stored[f"model.layers.{layer}.mlp.up_proj.weight"]
        up = model.model.layers[layer].mlp.up_proj
        assert torch.equal(up.weight_packed, q.packed)
        assert torch.equal(up.weight_codebook, q.codebook)
        assert up.info.codebook == "fit"


def test_options_that_do_not_fit_the_model(folders) -> None:
    source, _ = folders("llama", 3)
    load = auto_class("llama").from_pretrained
    with pytest.raises(kbitq.KbitqError, match=r"exclude '\*\.down_prj\.weight' matches no tensor"):
        load(source, quantization_config=kbitq.KbitqConfig(k=3, exclude=["*.down_prj.weight"]))
    with pytest.raises(OptionError, match=r"^dequantize=True is for a folder that kbitq has quantized"):
        load(source, quantization_config=kbitq.KbitqConfig(dequantize=True))
