#!/usr/bin/env bash
# Builds the core under AddressSanitizer and UndefinedBehaviorSanitizer and runs the core's tests against that build.
# Called by `make sanitize`, which sets PY (a Python that has torch and pytest). Everything lands in build/sanitize.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/build/sanitize

# A second environment: the sanitized package first, then the dependencies of PY's (a .pth line adds a folder without
# running the .pth files in it, so the editable install there stays out of the way).
python=$out/venv/bin/python
[ -x "$python" ] || "$PY" -m venv --without-pip "$out/venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PY" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' > "$site/dependencies.pth"
rm -rf "$site"/kbitq*
SKBUILD_BUILD_DIR=$out/cmake SKBUILD_CMAKE_DEFINE="KBITQ_SANITIZE=ON;KBITQ_CUDA=OFF" SKBUILD_INSTALL_STRIP=false \
    "$PY" -m pip install -q --no-deps --no-build-isolation --target "$site" "$root"

# Not from the root of the repository: its kbitq/ has no _C. Leaks are Python's own; torch frees what others allocate.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=print_stacktrace=1
cd "$out"
"$python" - <<'PY'
import kbitq._C, pathlib
path = pathlib.Path(kbitq._C.__file__)
assert b"__asan_init" in path.read_bytes(), f"{path} is not a sanitized build"
print(f"sanitized core: {path}")
PY
"$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -m "not slow" -q \
    "$@" $(ls "$root"/tests/codecs/test_codec*.py "$root"/tests/ops/test_codec.py "$root"/tests/ops/test_code_stream.py \
        "$root"/tests/formats/test_gguf_blocks.py "$root"/tests/functional/test_nf4.py 2>/dev/null)
