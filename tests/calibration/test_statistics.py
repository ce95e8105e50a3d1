"""A folder of statistics: what is written comes back, and what cannot be used is said in a sentence."""

import json
from pathlib import Path

import pytest
import torch

from kbitq.calibration.collect import Sums
from kbitq.calibration.statistics import Statistics
from kbitq.calibration.triangle import lower, symmetric, triangle
from kbitq.calibration.writer import Gathered, StatisticsWriter
from kbitq.errors import CalibrationError

ABOUT = {"sha256": "0" * 64}


def gram(seed: int, columns: int, rows: int = 40) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x.T @ x


def in_blocks(matrix: torch.Tensor, block: int | None) -> list[torch.Tensor]:
    columns = len(matrix)
    size = block or columns
    return [matrix[i : i + size, i : i + size] for i in range(0, columns, size)]


def gathered(names: list[str], matrices: list[torch.Tensor], block: int | None = None) -> Gathered:
    sums = [in_blocks(m, block) for m in matrices]
    return Gathered(dict.fromkeys(names), len(matrices[0]), block, [40] * len(matrices), sums)


def write(out: Path, *found: Gathered, max_shard_size: int = 10**9) -> Statistics:
    with StatisticsWriter(out, {}, max_shard_size) as writer:
        writer.add(found)
        writer.finish(ABOUT, ABOUT, {}, replace=False)
    return Statistics.open(out)


def test_a_matrix_comes_back_for_every_weight_that_shares_it(tmp_path: Path) -> None:
    h = gram(0, 96)
    statistics = write(tmp_path / "stats", gathered(["q.weight", "k.weight"], [h]))
    for name in ("q.weight", "k.weight"):
        found = statistics.of(name, (32, 96))
        assert found is not None
        assert torch.equal(found.matrix(), torch.tril(h) + torch.tril(h, -1).T)
        assert torch.equal(found.diagonal(), h.diagonal())
        assert (found.tokens, found.experts, found.block) == (40, 1, None)
    assert statistics.of("other.weight", (32, 96)) is None


def test_rows_beyond_a_band_are_mirrored(tmp_path: Path) -> None:
    h = gram(1, 2100, rows=3)
    found = write(tmp_path / "stats", gathered(["w.weight"], [h])).of("w.weight", (8, 2100))
    assert found is not None
    assert torch.equal(found.matrix(), torch.tril(h) + torch.tril(h, -1).T)


def test_only_blocks_on_the_diagonal(tmp_path: Path) -> None:
    h = gram(2, 80)
    found = write(tmp_path / "stats", gathered(["w.weight"], [h], block=32)).of("w.weight", (8, 80))
    assert found is not None
    wanted = torch.block_diag(*in_blocks(h, 32))
    assert found.block == 32
    torch.testing.assert_close(found.matrix(), wanted)
    assert torch.equal(found.diagonal(), h.diagonal())


def test_experts_have_one_each_whole_or_one_by_one(tmp_path: Path) -> None:
    hs = [gram(i, 48) for i in range(3)]
    one_by_one = Gathered(
        {f"m.experts.{e}.up_proj.weight": e for e in range(3)}, 48, None, [4, 0, 6], [[hs[0]], None, [hs[2]]]
    )
    statistics = write(tmp_path / "stats", gathered(["m.experts.gate_up_proj"], hs), one_by_one)
    whole = statistics.of("m.experts.gate_up_proj", (3, 16, 48))
    assert whole is not None
    assert whole.experts == 3
    assert whole.tokens == 120
    torch.testing.assert_close(whole.matrix(2), hs[2])
    parts = [statistics.of(f"m.experts.{e}.up_proj.weight", (16, 48)) for e in range(3)]
    assert [part and (part.experts, part.tokens) for part in parts] == [(1, 4), (1, 0), (1, 6)]
    assert parts[2] is not None
    torch.testing.assert_close(parts[2].matrix(), hs[2])
    assert parts[1] is not None
    assert not parts[1].matrix().any()
    with pytest.raises(IndexError):
        parts[1].matrix(1)


def test_shards_hold_the_same_and_have_the_same_fingerprint(tmp_path: Path) -> None:
    found = [gathered([f"{i}.weight"], [gram(i, 64)]) for i in range(5)]
    one = write(tmp_path / "one", *found)
    several = write(tmp_path / "several", *found, max_shard_size=20_000)
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["calibration.json", "hessians.safetensors"]
    names = sorted(p.name for p in (tmp_path / "several").iterdir())
    assert names[:2] == ["calibration.json", "hessians-00001-of-00003.safetensors"]
    assert "hessians.safetensors.index.json" in names
    assert one.fingerprint == several.fingerprint
    for i in range(5):
        a, b = (s.of(f"{i}.weight", (8, 64)) for s in (one, several))
        assert a is not None
        assert b is not None
        assert torch.equal(a.matrix(), b.matrix())


def test_the_fingerprint_is_that_of_the_values(tmp_path: Path) -> None:
    first = write(tmp_path / "a", gathered(["w.weight"], [gram(0, 64)]))
    assert first.fingerprint == Statistics.open(tmp_path / "a").fingerprint
    assert first.fingerprint == write(tmp_path / "b", gathered(["w.weight"], [gram(0, 64)])).fingerprint
    assert first.fingerprint != write(tmp_path / "c", gathered(["w.weight"], [gram(1, 64)])).fingerprint


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    found = [gathered([f"{i}.weight"], [gram(i, 64)]) for i in range(2)]
    with pytest.raises(KeyboardInterrupt), StatisticsWriter(tmp_path / "cut", {"seed": 0}) as writer:
        writer.add(found[:1])
        raise KeyboardInterrupt
    assert not (tmp_path / "cut").exists()
    with StatisticsWriter(tmp_path / "cut", {"seed": 0}) as writer:
        assert writer.steps == 1
        assert [entry.name for entry in writer.entries] == ["0.weight"]
        writer.add(found[1:])
        summary = writer.finish(ABOUT, ABOUT, {}, replace=False)
    assert summary.fingerprint == write(tmp_path / "whole", *found).fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "whole"]


def test_a_journal_that_was_cut_within_a_line_loses_that_step_only(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StatisticsWriter(tmp_path / "cut", {}) as writer:
        for i in range(2):
            writer.add([gathered([f"{i}.weight"], [gram(i, 64)])])
        raise KeyboardInterrupt
    journal = tmp_path / ".cut.kbitq-partial" / "journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    with StatisticsWriter(tmp_path / "cut", {}) as writer:
        assert writer.steps == 1
        writer.add([gathered(["1.weight"], [gram(1, 64)])])
        writer.finish(ABOUT, ABOUT, {}, replace=False)
    assert Statistics.open(tmp_path / "cut").names == ["0.weight", "1.weight"]


def test_a_run_with_another_key_starts_over(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StatisticsWriter(tmp_path / "cut", {"seed": 0}) as writer:
        writer.add([gathered(["w.weight"], [gram(0, 64)])])
        raise KeyboardInterrupt
    with StatisticsWriter(tmp_path / "cut", {"seed": 1}) as writer:
        assert (writer.steps, writer.entries) == (0, [])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "stats", gathered(["w.weight"], [gram(0, 64)]))
    return tmp_path / "stats"


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"not a folder of statistics: it has no calibration\.json"):
        Statistics.open(tmp_path)


def test_a_shape_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(CalibrationError, match=r"w\.weight are for 64 columns, but its shape is \[8, 32\]"):
        Statistics.open(folder).of("w.weight", (8, 32))


def test_a_file_that_is_cut_short(folder: Path) -> None:
    weights = folder / "hessians.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CalibrationError, match="hessians"):
        Statistics.open(folder)


def changed(folder: Path, change: dict) -> Path:
    path = folder / "calibration.json"
    table = json.loads(path.read_text())
    table["hessians"][0].update(change.pop("entry", {}))
    path.write_text(json.dumps({**table, **change}))
    return folder


@pytest.mark.parametrize(
    "change, said",
    [
        ({"version": 3}, "has version 3, and this kbitq reads versions up to 2"),
        ({"format": "else"}, "not what kbitq calibrate writes"),
        ({"text": None}, "lacks a part"),
        ({"entry": {"tokens": []}}, "has an entry that"),
        ({"entry": {"tensors": {"w.weight": 4}}}, "has an entry that"),
        ({"entry": {"columns": 63}}, r"w\.weight\.triangle is F32 \[2080\], but"),
        ({"entry": {"tensors": {"v.weight": None}}}, r"v\.weight\.triangle is missing"),
    ],
)
def test_a_summary_that_does_not_fit_its_files(folder: Path, change: dict, said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        Statistics.open(changed(folder, change))


def test_the_lower_triangle_of_a_wide_input_is_whole(device: str) -> None:
    x = torch.randn(9, 2100, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    sums = Sums(2100, None)
    sums.add(x)
    assert sums.matrices is not None
    packed = torch.cat(list(triangle(sums.matrices[0])))
    exact = x.double().cpu().T @ x.double().cpu()
    made = symmetric(packed.to(device), 2100).cpu()
    assert float((made - exact).abs().max() / exact.abs().max()) < 1e-5
    assert torch.equal(lower(packed.to(device), 2100).cpu(), made.tril())


@pytest.mark.parametrize(("columns", "block"), [(40, None), (40, 32), (90, 32)])  # of 90 too few tokens were seen
def test_what_a_factor_is_made_of_is_the_lower_triangle(
    tmp_path: Path, device: str, columns: int, block: int | None
) -> None:
    found = write(tmp_path / "stats", gathered(["w.weight"], [gram(2, columns)], block)).of("w.weight", (8, columns))
    assert found is not None
    assert torch.equal(found.usable_triangle(0, device).cpu(), found.usable().tril())
