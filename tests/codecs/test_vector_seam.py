"""A second codec needs no change of the vector ops: toy_codec.cpp has one, and is compiled with the ops as they are."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AVX2 = ("avx2", "fma", "f16c", "bmi2")
BF16 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")


def processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.slow
@pytest.mark.parametrize("features", [pytest.param(AVX2, id="avx2"), pytest.param(BF16, id="avx512_bf16")])
def test_a_codec_of_one_file_goes_through_the_vector_ops(tmp_path: Path, features: tuple[str, ...]) -> None:
    compiler = shutil.which("c++")
    if compiler is None or not processor_flags().issuperset(features):
        pytest.skip(f"toy codec: needs a C++ compiler and a processor with {features[-1]}")
    sources = [ROOT / "tests/codecs/toy_codec.cpp", ROOT / "csrc/cpu/scale_table.cpp"]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-DKBITQ_X86", *(f"-m{f.replace('_', '')}" for f in features)]
    program = tmp_path / "toy"
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
