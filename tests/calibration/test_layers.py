"""A model that does not fit is run layer by layer, and gives what the whole one gives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed")

from helpers.small_models import make_model, save_with_tokenizer
from kbitq.calibration import calibrate as job
from kbitq.calibration.calibrate import Options, calibrate
from kbitq.calibration.layers import Activations, LayerRun
from kbitq.calibration.statistics import Statistics
from kbitq.calibration.writer import StatisticsWriter
from kbitq.errors import CalibrationError

WHOLE = Options(samples=4, length=64, device="cpu")
FITS_A_LAYER = {"llama": 1_300_000, "bert": 1_400_000, "moe": 1_600_000}


def by_layers(kind: str, max_memory: int | None = None) -> Options:
    return Options(samples=4, length=64, device="cpu", max_memory=max_memory or FITS_A_LAYER[kind])


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    def make(kind: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
        return save_with_tokenizer(make_model(kind, dtype=dtype), tmp_path / kind, **options)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "bert", "moe"])
def test_the_same_values_as_the_whole_model(
    kind: str, dtype: torch.dtype, model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    folder = model(kind, dtype, max_shard_size="150KB")  # a layer is in several files
    whole = calibrate(folder, [text], tmp_path / "whole", WHOLE)
    layered = calibrate(folder, [text], tmp_path / "layers", by_layers(kind))
    assert layered.summary == whole.summary
    assert (layered.tokens, layered.notes) == (whole.tokens, whole.notes)
    assert len(list((tmp_path / "layers").glob("hessians-*.safetensors"))) == (3 if kind == "bert" else 2)
    assert len(list((tmp_path / "whole").glob("hessians*.safetensors"))) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([kind, "layers", "text.txt", "whole"])


def test_only_one_layer_is_loaded_at_a_time(
    model: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, collected = [], LayerRun._collect

    def watched(self: LayerRun, weights: Any) -> Any:
        state = self._skeleton.model.state_dict()
        loaded.append({n.split(".")[2] for n, p in state.items() if ".layers." in n and not p.is_meta})
        return collected(self, weights)

    monkeypatch.setattr(LayerRun, "_collect", watched)
    calibrate(model("llama"), [text], tmp_path / "stats", by_layers("llama"))
    assert loaded == [{"0"}, {"1"}, set()]


def test_a_run_that_was_cut_goes_on_at_its_layer(
    model: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, added = model("llama"), []
    whole = calibrate(folder, [text], tmp_path / "whole", WHOLE)
    add = StatisticsWriter.add

    def counted(self: StatisticsWriter, gathered: Any) -> None:
        add(self, gathered)
        added.append(len(gathered))

    def stop(progress: Any) -> None:
        if progress.bytes_done > 256 and progress.bytes_done > progress.bytes_total // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(StatisticsWriter, "add", counted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(folder, [text], tmp_path / "stats", by_layers("llama"), stop)
    assert added == [4]
    assert (tmp_path / ".stats.kbitq-partial").is_dir()
    assert not list((tmp_path / ".stats.kbitq-partial").glob("activations*"))
    resumed = calibrate(folder, [text], tmp_path / "stats", by_layers("llama"))
    assert added == [4, 4, 0]
    assert resumed.summary == whole.summary
    assert Statistics.open(tmp_path / "stats").fingerprint == whole.summary.fingerprint
    assert not list(tmp_path.glob(".*"))


def test_another_text_starts_over(model: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    folder = model("llama")

    def stop(progress: Any) -> None:
        if progress.bytes_done > progress.bytes_total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(folder, [text], tmp_path / "stats", by_layers("llama"), stop)
    text.write_text(text.read_text()[::-1])
    made = calibrate(folder, [text], tmp_path / "stats", by_layers("llama"))
    assert made.summary == calibrate(folder, [text], tmp_path / "whole", WHOLE).summary


def test_activations_go_to_the_disk_where_they_do_not_fit(
    model: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, close = [], Activations.close

    def closed(self: Activations) -> None:
        paths.append((self._path is not None, bool(self._path and self._path.exists())))
        close(self)

    monkeypatch.setattr(Activations, "close", closed)
    folder = model("llama")
    whole = calibrate(folder, [text], tmp_path / "whole", WHOLE)
    monkeypatch.setattr(job, "check_layers_fit", lambda *_: True)
    assert calibrate(folder, [text], tmp_path / "stats", by_layers("llama")).summary == whole.summary
    assert paths == [(True, True), (True, True)]


def test_activations_come_back(tmp_path: Path) -> None:
    for path in (None, tmp_path / "activations"):
        kept = Activations(path)
        values = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
        for i, value in enumerate(values):
            kept.put(i, value)
        kept.put(1, values[1] * 2)
        assert [torch.equal(kept.get(i), v) for i, v in enumerate([values[0], values[1] * 2, values[2]])] == [True] * 3
        kept.close()
    assert not list(tmp_path.iterdir())


def test_a_layer_that_does_not_fit_says_what_it_needs(model: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    folder = model("llama")
    with pytest.raises(CalibrationError, match=r"needs ([\d,]+) bytes, which is more than max_memory") as raised:
        calibrate(folder, [text], tmp_path / "stats", by_layers("llama", 10_000))
    need = int(str(raised.value.data["need"]))
    calibrate(folder, [text], tmp_path / "stats", by_layers("llama", need))
    assert not list(tmp_path.glob(".*"))


def test_weights_in_another_tools_format_are_decoded(model: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    """The same statistics as of the model that they decode to; transformers' way to run such models is not taken."""
    stored, plain = model("llama"), tmp_path / "plain"
    shutil.copytree(stored, plain)
    tensors, decoded = load_file(stored / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        codes = (tensors[name] / scale).round().to(torch.int8)
        decoded[name] = codes.to(torch.bfloat16) * scale
        tensors.update({name: codes, f"{name}_scale": scale})
    save_file({**load_file(plain / "model.safetensors"), **decoded}, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (stored / "config.json").write_text(json.dumps(config))
    calibrate(stored, [text], tmp_path / "stored stats", by_layers("llama"))
    calibrate(plain, [text], tmp_path / "plain stats", by_layers("llama"))
    made = {p.name: load_file(p) for p in (tmp_path / "stored stats").glob("hessians-*.safetensors")}
    assert len(made) == 2
    for name, expected in made.items():
        again = load_file(tmp_path / "plain stats" / name)
        assert again.keys() == expected.keys() and all(again[key].equal(value) for key, value in expected.items())
