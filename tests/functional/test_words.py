"""The word layout: its bits, the nearest level beside exact arithmetic, rounding at random."""

from fractions import Fraction

import pytest
import torch

from kbitq.functional import (
    compact_codebook,
    create_normal_float_codebook,
    dequantize_words,
    pack_words,
    quantize_words,
    unpack_words,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", range(2, 9))
def test_bits_of_words(device, k):
    n = 5 * (32 // k) + 1
    indices = torch.randint(0, 2**k, (n,), generator=torch.Generator().manual_seed(k))
    words = pack_words(indices.to(device), k)
    assert words.dtype == torch.int32 and words.shape == (6,)
    for i, index in enumerate(indices.tolist()):
        assert (words[i // (32 // k)].item() >> i % (32 // k) * k) & (2**k - 1) == index
    assert torch.equal(unpack_words(words, k, n).cpu(), indices.to(torch.uint8))


def test_words_run_on_across_blocks():
    words, absmax, _ = quantize_words(normal(100), k=3, block=32)
    assert words.shape == (10,) and absmax.shape == (4,)  # 10 indices a word, not 4 blocks of 4 words


@pytest.mark.parametrize("form", ["fp32", "e4m4"])
@pytest.mark.parametrize("k, block", [(2, 32), (3, 64), (4, 4096), (5, 128), (8, 32)])
def test_the_level_is_the_nearest_in_exact_arithmetic(device, k, block, form):
    a = normal(300, seed=k).bfloat16()  # few bits, so that ties occur
    words, absmax, levels = quantize_words(a.to(device), k, block, absmax_format=form)
    decoded = dequantize_words(words, absmax, levels, k, 300, block, torch.float32).cpu()
    index = unpack_words(words, k, 300).cpu().tolist()
    scales = dequantize_words(
        pack_words(torch.full((300,), 2**k - 1), k), absmax.cpu(), levels.cpu(), k, 300, block, torch.float32
    )
    exact = [Fraction(v) for v in levels.tolist()]
    for i in range(300):
        s = Fraction(scales[i].item())  # the largest level is 1
        distances = [abs(Fraction(a[i].item()) - level * s) for level in exact]
        assert index[i] == distances.index(min(distances))
        assert decoded[i].item() == (levels[index[i]].cpu() * scales[i]).item()


def test_ties_go_to_the_lower_level():
    levels = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    words, _, _ = quantize_words(torch.tensor([1.0, 0.25, 0.75, -0.5]), 2, 32, levels)
    assert unpack_words(words, 2, 4).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("k", [2, 4, 7])
def test_maps_of_256_entries_are_compacted(k):
    levels = create_normal_float_codebook(k)
    book = torch.zeros(256)
    book[: 2 ** (k - 1)], book[-(2 ** (k - 1)) :] = levels[: 2 ** (k - 1)], levels[2 ** (k - 1) :]
    assert torch.equal(compact_codebook(book, k), levels)
    a = normal(500)
    assert torch.equal(quantize_words(a, k, codebook=book)[0], quantize_words(a, k, codebook=levels)[0])


def test_a_map_with_one_level_less_has_zero():
    book = torch.zeros(256)
    book[:3] = torch.tensor([-1.0, 0.5, 1.0])
    assert compact_codebook(book, 2).tolist() == [-1.0, 0.0, 0.5, 1.0]


def test_codebooks_in_any_order_and_with_equal_levels():
    levels = torch.tensor([0.5, -1.0, 0.5, 1.0])
    words, absmax, kept = quantize_words(torch.tensor([1.0, 0.4, -0.9, 0.6]), 2, 32, levels)
    assert torch.equal(kept, levels)
    assert dequantize_words(words, absmax, kept, 2, 4, 32, torch.float32).tolist() == [1.0, 0.5, -1.0, 0.5]


@pytest.mark.parametrize("k, block", [(2, 32), (4, 64)])
def test_rounding_at_random_is_unbiased(device, k, block):
    """Means over many seeds lie where the binomial distribution of the two neighbours says, each and all together."""
    a, draws = normal(512, seed=3), 400
    runs = [quantize_words(a.to(device), k, block, seed=seed) for seed in range(draws)]
    values = torch.stack([dequantize_words(*run, k, 512, block, torch.float32) for run in runs]).cpu().double()
    off, low, high = values.mean(0) - a.double(), values.amin(0), values.amax(0)
    assert ((low - 1e-6 <= a) & (a <= high + 1e-6)).float().mean() > 0.9  # both neighbours occur but for rare ones
    spread = ((high - a.double()) * (a.double() - low)).clamp(min=0) / draws
    assert (off.abs() <= 5 * spread.sqrt() + 6 / draws).all()
    assert off.sum().abs() <= 5 * spread.sum().sqrt() + 0.1
    nearest = dequantize_words(*quantize_words(a.to(device), k, block), k, 512, block, torch.float32).cpu().double()
    assert (nearest - a.double()).abs().mean() > 5 * off.abs().mean()


def test_a_seed_gives_the_same_words_again(device):
    a = normal(1000).to(device)
    assert torch.equal(quantize_words(a, seed=5)[0], quantize_words(a, seed=5)[0])
    assert not torch.equal(quantize_words(a, seed=5)[0], quantize_words(a, seed=6)[0])


@pytest.mark.parametrize("k", [1, 9])
def test_k_that_there_is_not(k):
    with pytest.raises(ValueError, match="k must be"):
        quantize_words(torch.ones(64), k)


def test_arguments_that_do_not_fit():
    for call in (
        lambda: quantize_words(torch.ones(64), block=48),
        lambda: quantize_words(torch.ones(64), absmax_format="fp8"),
        lambda: quantize_words(torch.ones(64).double()),
        lambda: quantize_words(torch.ones(64), codebook=torch.ones(15)),
        lambda: dequantize_words(torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.ones(16), 4, 9),
        lambda: dequantize_words(torch.zeros(99, dtype=torch.int32), torch.ones(1), torch.ones(16), 4, 99),
    ):
        with pytest.raises(ValueError):
            call()


def test_empty_and_zero_blocks(device):
    words, absmax, levels = quantize_words(torch.zeros(0, device=device))
    assert words.numel() == 0 and absmax.numel() == 0
    words, absmax, levels = quantize_words(torch.zeros(64, device=device))
    assert not dequantize_words(words, absmax, levels, 4, 64).any()
