"""Codebooks: their shape and normalisation, the files they come from, and that `optimal` is a fixed point."""

import json
from statistics import NormalDist

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kbitq.codecs import codebooks, reference
from kbitq.errors import CodebookError

ALL_K = range(2, 9)


@pytest.mark.parametrize("make", [codebooks.nf, codebooks.optimal])
@pytest.mark.parametrize("k", ALL_K)
def test_builtin_levels_are_symmetric_and_normalised(make, k):
    levels = make(k)
    assert levels.shape == (2**k,) and levels.dtype == np.float32
    assert (np.diff(levels) > 0).all()
    assert np.array_equal(levels, -levels[::-1])
    assert levels[-1] == 1
    assert np.array_equal(codebooks.normalise(levels), levels)


@pytest.mark.parametrize("k", ALL_K)
def test_nf_is_made_of_normal_quantiles(k):
    """The distribution function of each level, scaled back, is (i + 0.5) / 2^k."""
    largest = NormalDist().inv_cdf(1 - 0.5 / 2**k)
    probability = [NormalDist().cdf(float(level) * largest) for level in codebooks.nf(k)]
    np.testing.assert_allclose(probability, (np.arange(2**k) + 0.5) / 2**k, atol=1e-7)


def test_known_nf_values():
    np.testing.assert_allclose(codebooks.nf(2)[2:], [0.31863936 / 1.15034938, 1], atol=1e-7)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_optimal_is_a_fixed_point_of_lloyds_iteration(k):
    """On other samples than it was derived from, moving each level to its centroid hardly moves it."""
    levels = codebooks.optimal(k)
    w = np.random.RandomState(77).standard_normal((4096, 32)).astype(np.float32)
    packed, absmax, stored = reference.quantize(w, k, levels)
    index = reference.unpack_planes(packed, k).reshape(w.shape)
    s = np.broadcast_to(reference.decode_e4m4(absmax), w.shape).astype(np.float64)
    v = w / float(stored[-1])
    centroid = np.array([(v * s)[index == j].sum() / (s * s)[index == j].sum() for j in range(2**k)])
    np.testing.assert_allclose(centroid, levels, atol=0.01)


def test_normalise_divides_by_the_largest_magnitude():
    assert codebooks.normalise([-4, -1, 0.5, 2]).tolist() == [-1, -0.25, 0.125, 0.5]


def test_normalise_flushes_tiny_levels_and_negative_zero():
    unit = codebooks.normalise([-(2**-12), -(2**-12) * 0.999, -0.0, 1e-30, 2**-13, 0.5, 1, 1])
    assert unit.tolist() == [-(2**-12), 0, 0, 0, 0, 0.5, 1, 1]
    assert not np.signbit(unit[1:]).any()


@pytest.mark.parametrize(
    "levels, complaint",
    [
        ([0, 0, 0, 0], "all zero"),
        ([1, 0, 2, 3], "level 1 is below"),
        ([0, 1, float("nan"), 2], "level 2 is not finite"),
        ([-float("inf"), 0, 1, 2], "level 0 is not finite"),
        ([[0, 1], [2, 3]], "flat list"),
        ([], "flat list"),
        (["a", "b"], "numbers"),
        (3.0, "flat list"),
    ],
)
def test_bad_levels_are_refused(levels, complaint):
    with pytest.raises(CodebookError, match=complaint):
        codebooks.normalise(levels)


def test_levels_by_name_array_and_tensor():
    assert codebooks.levels("nf", 3)[1] == "nf"
    levels, name = codebooks.levels("optimal", 5)
    assert name == "optimal" and np.array_equal(levels, codebooks.optimal(5))
    for custom in ([0, 1, 2, 4], np.array([0.0, 1, 2, 4]), torch.tensor([0, 1, 2, 4.0], dtype=torch.bfloat16)):
        levels, name = codebooks.levels(custom, 2)
        assert name == "custom" and levels.dtype == np.float32 and levels.tolist() == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize(
    "content", [[-2, 0, 1, 2], {"levels": [-2, 0, 1, 2]}, {"2": [-2, 0, 1, 2], "3": [0, 1, 2, 3, 4, 5, 6, 7]}]
)
def test_levels_from_json(tmp_path, content):
    path = tmp_path / "levels.json"
    path.write_text(json.dumps(content))
    for spec in (path, str(path)):
        levels, name = codebooks.levels(spec, 2)
        assert name == "custom" and levels.tolist() == [-1, 0, 0.5, 1]


@pytest.mark.parametrize("names", [("codebook",), ("anything",), ("other", "codebook")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_levels_from_safetensors(tmp_path, names, dtype):
    path = tmp_path / "levels.safetensors"
    save_file({name: torch.tensor([-2, 0, 1, 2], dtype=dtype) for name in names}, path)
    assert codebooks.levels(path, 2)[0].tolist() == [-1, 0, 0.5, 1]


def test_file_errors_name_the_file_and_the_trouble(tmp_path):
    def write(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "two.safetensors")
    cases = {
        str(tmp_path / "absent.json"): "no such codebook file",
        "optimum": "neither nf or optimal nor a .json",
        write("broken.json", "[1, 2"): "cannot be read as JSON",
        write("nothing.json", '{"5": [1]}'): "no.* 'levels' nor an entry for K=2|neither 'levels' nor an entry for K=2",
        write("short.json", "[1, 2]"): "K=2 takes 4 levels, there are 2",
        write("falling.json", "[4, 3, 2, 1]"): "must ascend",
        write("words.json", '"optimal"'): "flat list|numbers",
        write("broken.safetensors", "junk"): "cannot be read as safetensors",
        str(tmp_path / "two.safetensors"): "none is named 'codebook'",
    }
    for spec, complaint in cases.items():
        with pytest.raises(CodebookError, match=complaint) as caught:
            codebooks.levels(spec, 2)
        assert spec in str(caught.value)


@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize("spec", ["nf", "optimal", [0.0, 1.0]])
def test_k_outside_the_format_is_refused(spec, k):
    with pytest.raises(CodebookError, match=r"K must be 2\.\.8"):
        codebooks.levels(spec, k)


def test_wrong_count_is_refused():
    with pytest.raises(CodebookError, match="K=3 takes 8 levels, there are 4"):
        codebooks.levels([0, 1, 2, 3], 3)
