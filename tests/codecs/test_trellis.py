"""The codec ``trellis``: bytes that never change, quality, and its way through tensors, files and layers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file

import kbitq
from kbitq import ops
from kbitq.checkpoint import QuantizeOptions, choose, dequantize_checkpoint, inspect, plan_quantize, run, verify
from kbitq.checkpoint.source.spans import spans
from kbitq.choose.knapsack import Budget
from kbitq.choose.recipe import parse_rule, rule_text
from kbitq.choose.selection import TensorRule
from kbitq.codecs import codebooks, trellis_reference
from kbitq.codecs.base import get_codec, span_stats
from kbitq.errors import CodecError, SelectionError
from kbitq.nn import KbitEmbedding, KbitLinear

GOLDEN = load_file(Path(__file__).with_name("golden") / "trellis.safetensors")
CASES = sorted({name.rsplit(".", 1)[0] for name in GOLDEN if name.endswith("absmax")})
NAMES = {32: "trellis", 128: "trellis/128"}
# SQNR in dB of N(0,1) with the `optimal` levels, K = 1 to 4: what docs/quality.md promises.
FLOORS = {32: (5.40, 11.48, 17.55, 23.25), 128: (5.20, 11.06, 16.98, 22.62)}


def recipe(case: str) -> tuple[np.ndarray, int, int, str, np.ndarray | None]:
    """ "plain.k3.b128.mse" -> source, K, scale block, scale rule, importance."""
    source, k, block, rule = case.split(".")
    importance = GOLDEN["importance"] if rule == "importance" else None
    return GOLDEN[source], int(k[1:]), int(block[1:]), "mse" if rule == "importance" else rule, importance


def compare(case: str, made: tuple[np.ndarray, ...]) -> None:
    for part, got in zip(("packed", "absmax", "codebook"), made, strict=True):
        want = GOLDEN.get(f"{case}.{part}")
        if want is None:
            assert part == "codebook"  # kept once a source
            continue
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), part


@pytest.mark.parametrize("case", CASES)
def test_reference_gives_the_golden_bytes(case: str) -> None:
    w, k, scale_block, scale, importance = recipe(case)
    levels = codebooks.optimal_trellis(k, scale_block)
    compare(
        case,
        trellis_reference.quantize(w, k, levels, scale=scale, importance=importance, scale_block=scale_block),
    )


def test_core_gives_the_golden_bytes(engine: str) -> None:
    assert len(CASES) == 2 * 4 * (3 * 2 + 1)
    for case in CASES:
        w, k, scale_block, scale, importance = recipe(case)
        w, levels = (torch.from_numpy(a).to(engine) for a in (w, codebooks.optimal_trellis(k, scale_block)))
        weights = None if importance is None else ops.prepare_importance(torch.from_numpy(importance)).to(engine)
        made = ops.quantize(w, levels, amax=ops.scan(w)[0], importance=weights, scale=scale, codec=NAMES[scale_block])
        compare(case, tuple(t.cpu().numpy() for t in made))


@pytest.mark.parametrize("scale_block", [32, 128])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_quality_on_normal_weights(k: int, scale_block: int) -> None:
    w = torch.from_numpy(np.random.RandomState(5).standard_normal((512, 1024)).astype(np.float32))
    q = kbitq.quantize(w, k, codec="trellis", scale_block=scale_block)
    assert q.sqnr_db is not None and q.sqnr_db >= FLOORS[scale_block][k - 1]
    assert q.bits_per_weight == k + 8 / scale_block
    assert q.codec == NAMES[scale_block]
    back = q.dequantize()
    assert 10 * torch.log10(w.square().sum() / (w - back).square().sum()).item() == pytest.approx(q.sqnr_db, abs=1e-4)


def test_the_independent_rule_of_the_document() -> None:
    """Element by element from docs/format.md, with nothing of kbitq but the scale byte's definition."""
    q = kbitq.quantize(torch.randn(3, 70), 3, codec="trellis", scale_block=128)
    words, book = q.packed.numpy().view(np.uint32), q.codebook.numpy()
    for r in range(3):
        for c in range(70):
            block, i = divmod(c, 32)
            path, w1, w2 = (int(words[r, block * 3 + j]) for j in range(3))

            def p(at: int, path: int = path) -> int:
                return path >> (at % 32) & 1

            index = p(i) | (p(i - 3) ^ p(i - 5)) << 1
            index |= (p(i + 1) ^ p(i - 1) ^ p(i - 2) ^ p(i - 4) ^ p(i - 5)) << 2
            index |= (w1 >> i & 1) << 3 | (w2 >> i & 1) << 4
            byte = int(q.absmax[r, c // 128])
            e, m = byte >> 4, byte & 15
            scale = 2.0 ** (e - 11) * (1 + m / 16) if e else 2.0**-10 * (m / 16)
            assert q.dequantize()[r, c].item() == np.float32(book[index]) * np.float32(scale)


def test_a_block_of_zeros_decodes_to_zeros_that_are_not_negative() -> None:
    for k in (1, 2, 3, 4):
        back = kbitq.quantize(torch.cat([torch.zeros(1, 64), torch.ones(1, 64)]), k, codec="trellis").dequantize()
        assert not back[0].any() and not torch.signbit(back[0]).any()


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([64, 4096]), st.sampled_from([32, 128]))
def test_sums_do_not_depend_on_where_a_row_is_cut(k: int, cols: int, most: int, scale_block: int) -> None:
    codec = get_codec(NAMES[scale_block])
    w = torch.from_numpy(np.random.RandomState(cols).standard_normal((2, cols)).astype(np.float32))
    q = kbitq.quantize(w, k, codec=codec.name)
    sums = torch.zeros(3, dtype=torch.float64)
    rows: dict[int, list[torch.Tensor]] = {}
    for span in spans(2, cols, most, cut=codec.cut):
        values = w.reshape(-1)[span.first_element :][: span.numel].reshape(span.rows, span.cols)
        parts = {"codebook": q.codebook}
        for name, at in codec.place(span, k).items():
            part = next(p for p in codec.parts("", (span.rows, span.cols), k) if p.name == name)
            flat = q.parts[name].reshape(-1).view(torch.uint8)[at : at + part.nbytes]
            parts[name] = flat.view(q.parts[name].dtype).reshape(part.shape)
        table = span_stats(codec, values, parts, span)
        assert len(table) == span.sums
        first = span.first_element // cols
        for i, row in enumerate(table):
            rows.setdefault(first + i if span.whole_rows else first, []).append(row)
    for r in range(2):
        for row in rows[r]:  # left to right, as the sums of a row are defined
            sums[:2] += row[:2] if len(rows[r]) == 1 else 0
        if len(rows[r]) > 1:
            sums[:2] += torch.stack(rows[r])[:, :2].cumsum(0)[-1]
    assert sums[1].item() == pytest.approx(ops.stats(w, *q.parts.values(), codec=codec.name)[:, 1].sum().item())


@pytest.mark.parametrize("rows_of_x", [1, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", NAMES.values())
def test_layers(codec: str, dtype: torch.dtype, rows_of_x: int) -> None:
    w = torch.randn(48, 200)
    q = kbitq.quantize(w, 3, codec=codec)
    layer = KbitLinear.from_quantized(q, dtype=dtype)
    x = torch.randn(rows_of_x, 200).to(dtype).requires_grad_()
    y = layer(x)
    dense = q.dequantize(torch.float64)
    wanted = x.detach().double() @ dense.T
    assert (y.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * wanted.abs().max()
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.double(), dense.sum(0).expand(rows_of_x, -1), rtol=0.02, atol=0.1)
    table = KbitEmbedding.from_quantized(q, dtype=torch.float32)
    assert torch.equal(table(torch.tensor([3, 47])), q.dequantize(torch.float32)[[3, 47]])


def test_fit_gains_on_weights_that_are_not_normal() -> None:
    w = torch.from_numpy(np.random.RandomState(1).laplace(size=(256, 512)).astype(np.float32) ** 3)
    for codec in NAMES.values():
        usual, fitted = (kbitq.quantize(w, 2, codec=codec, codebook=book) for book in ("optimal", "fit"))
        assert fitted.codebook_name == "fit" and fitted.sqnr_db > usual.sqnr_db + 0.1


# --- checkpoints


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.up_proj.weight": torch.randn(96, 200 + 40 * i, generator=generator) for i in range(3)}
    tensors["long.weight"] = torch.randn(2, 70001, generator=generator)
    tensors["norm.weight"] = torch.ones(200)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def made(source: Path, name: str, **options: Any) -> Path:
    out = source.with_name(name)
    run(choose(plan_quantize(source, out, QuantizeOptions(**options))))
    return out


@pytest.mark.parametrize("codec", NAMES.values())
def test_a_file_through_every_stage(source: Path, codec: str) -> None:
    out = made(source, "out.safetensors", k=1, codec=codec)
    small = made(source, "small.safetensors", k=1, codec=codec, max_memory=1 << 20)
    assert out.read_bytes() == small.read_bytes()
    with safe_open(out, "pt") as file:
        said = json.loads(file.metadata()["kbitq"])
    assert said["format_version"] == 2
    entry = said["tensors"]["long.weight"]
    assert (entry["codec"], entry.get("scale_block", 32)) == ("trellis", get_codec(codec).cut)
    assert verify(out, source=source, full=True).problems == []
    bits = inspect(out, against=source).totals["bits_per_weight"]
    assert bits == pytest.approx(1 + 8 / get_codec(codec).cut, abs=0.1)
    dequantize_checkpoint(out, source.with_name("back.safetensors"))
    with safe_open(source, "pt") as plain, safe_open(source.with_name("back.safetensors"), "pt") as back:
        w = plain.get_tensor("long.weight")
        assert torch.equal(back.get_tensor("long.weight"), kbitq.quantize(w, 1, codec=codec).dequantize())


def test_versions_of_files(source: Path) -> None:
    """A file of planes stays version 1, and one rule for one tensor makes it 2."""
    for rules, version in (((), 1), ((parse_rule("layers.0.*=trellis:k2/128"),), 2)):
        out = made(source, f"v{version}.safetensors", k=3, rules=rules)
        with safe_open(out, "pt") as file:
            said = json.loads(file.metadata()["kbitq"])
        assert said["format_version"] == version
        coded = {name: (t.get("codec"), t.get("scale_block"), t["k"]) for name, t in said["tensors"].items()}
        assert coded["layers.1.up_proj.weight"] == (None, None, 3)
        assert coded["layers.0.up_proj.weight"] == (("trellis", 128, 2) if rules else (None, None, 3))


def test_a_budget_chooses_among_codecs(source: Path) -> None:
    for bpw in (1.2, 2.5, 5.3):
        out = source.with_name("x.safetensors")
        plan = choose(plan_quantize(source, out, QuantizeOptions(codec="auto", budget=Budget(bpw))))
        assert plan.choice is not None and plan.choice.bits_per_weight <= bpw
        assert plan.choice.error <= (plan.choice.uniform_error or np.inf)
        if bpw > 2.3:  # never worse than the planes alone
            planes = choose(plan_quantize(source, plan.out, QuantizeOptions(budget=Budget(bpw))))
            assert planes.choice is not None and plan.choice.error < planes.choice.error
    with pytest.raises(SelectionError, match="budget"):
        plan_quantize(source, source.with_name("x.safetensors"), QuantizeOptions(k=3, codec="auto"))


def test_a_rule_that_sets_k_alone_goes_with_both_codecs(source: Path) -> None:
    rules = tuple(map(parse_rule, ("layers.0.*=k5", "layers.1.*=k1", "layers.2.*=k3")))
    options = QuantizeOptions(codec="auto", budget=Budget(3.5), rules=rules)
    plan = choose(plan_quantize(source, source.with_name("x.safetensors"), options))
    found = {t.name.split(".")[1]: (t.codec, t.k) for t in plan.tensors if t.pinned}
    assert found == {"0": ("planes", 5), "1": ("trellis", 1), "2": ("planes", 3)}


def test_the_recipe_of_a_budget_gives_the_same_bytes(source: Path) -> None:
    from kbitq.checkpoint import write_recipe
    from kbitq.choose.recipe import load_recipe

    plan = choose(
        plan_quantize(source, source.with_name("a.safetensors"), QuantizeOptions(codec="auto", budget=Budget(2.2)))
    )
    run(plan)
    write_recipe(plan, source.with_name("r.toml"))
    found = load_recipe(source.with_name("r.toml"))
    again = made(source, "b.safetensors", rules=found.rules, **found.options)
    assert again.read_bytes() == source.with_name("a.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a=trellis:k2/128", TensorRule("a", k=2, codec="trellis/128")),
        ("a=trellis:k1", TensorRule("a", k=1, codec="trellis")),
        ("a=trellis/128", TensorRule("a", codec="trellis/128")),
        ("a=planes:k4,scale=absmax", TensorRule("a", k=4, codec="planes", scale="absmax")),
        ("k=k3", TensorRule("k", k=3)),
    ],
)
def test_rules(text: str, rule: TensorRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(rule_text(rule)) == rule


@pytest.mark.parametrize("text", ["a=trellis:k9", "a=trellis:k2/64", "a=planes:k2/128", "a=foo:k2", "a=trellis:"])
def test_rules_that_are_refused(text: str) -> None:
    with pytest.raises(SelectionError):
        parse_rule(text)


def test_what_is_refused(source: Path) -> None:
    w = torch.randn(4, 64)
    for k in (0, 5):
        with pytest.raises(ValueError, match="k must be 1 to 4"):
            kbitq.quantize(w, k, codec="trellis")
    with pytest.raises(CodecError, match="trellis/64"):
        kbitq.quantize(w, 3, codec="trellis", scale_block=64)
    with pytest.raises(SelectionError, match=r"outside 1\.\.4"):
        plan_quantize(source, source.with_name("x.safetensors"), QuantizeOptions(k=5, codec="trellis"))
