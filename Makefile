# SPDX-License-Identifier: Apache-2.0
#
# One command each; CMake and its presets do the work.
#   make                   configure and build in build/
#   make run               build, train small models with the plain residual, hc and mHC, several seeds -> report.html
#   make python            build the Python extension beside its sources: PYTHONPATH=python python3 -c "import weft"
#   make test              build, install what the tests need, run all tests
#   make docs              the documentation site -> build/docs/site/index.html, without the network
#   make bench             benchmark: OP=mhc_post_fwd BACKEND=cpu ARGS="--tokens 4096 --json"
#   make format            clang-format all C sources and ruff all Python sources in place
#   make check             all that CI asks for: format, tests, sanitizers, fuzzing
#   make gpu-record        on a machine with a GPU: all tests, compute-sanitizer, benchmarks -> bench/baselines/<gpu>.jsonl
#   make fuzz              fuzz what takes data from outside, FUZZ_SECONDS a target
#   make wheel             CUDA=ON for the one with CUDA, for all GPUs -> dist/*.whl, for machines without a compiler
#   make install           PREFIX=/usr/local DESTDIR=, and make uninstall with the same
# What is missing on the machine is installed: Debian packages as root or through a sudo that asks no password, Python packages in
# .venv. WEFT_INSTALL_DEPS=0 has it named instead.
# The CUDA backend is built where nvcc is: CUDA=OFF leaves it out, CUDA=ON insists. It is compiled for the GPUs of this machine, or
# for one kind where there is none; CUDA_ARCH=all compiles for all of them, CUDA_ARCH="80;90a-real" for a list.

PREFIX ?= /usr/local
LIBDIR ?= lib
DESTDIR ?=
WERROR ?= OFF
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
FUZZ_SECONDS ?= 60
C_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')
RUFF = PATH=$$PWD/.venv/bin:$$PATH ruff

BUILD ?= build
PTX_BUILD ?= build-ptx80
CUDA ?=
CUDA_ARCH ?=

CMAKE_FLAGS = -DWEFT_WERROR=$(WERROR) -DCMAKE_INSTALL_PREFIX=$(PREFIX) -DCMAKE_INSTALL_LIBDIR=$(LIBDIR)
CMAKE_FLAGS += -DWEFT_CUDA=$(or $(CUDA),AUTO) $(if $(CUDA_ARCH),"-DWEFT_CUDA_ARCHITECTURES=$(CUDA_ARCH)")
export CTEST_PARALLEL_LEVEL ?= $(JOBS)

SHELL = /bin/bash

.PHONY: all build python run test bench format check check-format check-asan check-tsan check-fuzz fuzz install uninstall wheel clean
.PHONY: gpu-record check-record build-ptx80
.PHONY: deps-build deps-run deps-test deps-format deps-check deps-docs build-tests docs reference

all: build

deps-build deps-run deps-test deps-format deps-check deps-docs:
	@tools/deps.sh $(@:deps-%=%)

build: deps-build
	@cmake --preset release $(CMAKE_FLAGS) >/dev/null
	@cmake --build --preset release

build-tests: deps-test
	@cmake --preset release $(CMAKE_FLAGS) -DWEFT_TESTS=ON -DWEFT_PYTHON=ON \
		-DWEFT_TEST_PYTHON="$$(tools/python_env.sh)" >/dev/null
	@cmake --build --preset release

python: deps-build
	@cmake --preset release $(CMAKE_FLAGS) -DWEFT_PYTHON=ON >/dev/null
	@cmake --build --preset release --target weft_python

# Less than three minutes on two cores with the build. CUDA is compiled only where there is a GPU to use it.
GPU = $(if $(filter OFF,$(CUDA)),,$(wildcard /dev/nvidia0))
BEGUN := $(shell date +%s)
run: CUDA := $(or $(CUDA),$(if $(wildcard /dev/nvidia0),AUTO,OFF))
run: deps-run build
	@tools/first_run.sh build/weft build/runs report.html $(if $(GPU),cuda,cpu) $(BEGUN)

bench: build
	build/weft bench $(if $(OP),--op $(OP)) $(if $(BACKEND),--backend $(BACKEND)) $(ARGS)

# The log is kept so that a run of several suites can close with the summary of this one.
test: build-tests
	@set -o pipefail; ctest --preset release | tee build/ctest.log
	@grep -q '^WEFT_TEST_PYTHON:[^=]*=.' build/CMakeCache.txt || \
		echo "Tests of the Python package: skipped, there is no Python with PyTorch and pytest."
	@$(if $(WEFT_GOLDEN_DIR),,echo "Golden files: skipped, WEFT_GOLDEN_DIR is not set.")

docs: deps-docs
	@tools/site/build.py --out build/docs

# Tables of docs/reference and the figures, from the library and the records.
reference: build
	@tools/reference.py build/libweft.so build/weft
	@tools/gpu_table.py --write docs/performance.md
	@tools/figures.py
	@tools/draw.py

format: deps-format
	@clang-format -i $(C_SOURCES)
	@$(RUFF) check -q --select I --fix
	@$(RUFF) format -q

check: WERROR = ON
check: check-format test check-asan check-tsan check-fuzz check-record
	@echo "make check: format, tests, sanitizers and fuzzing passed."

check-format: deps-format
	@clang-format --dry-run -Werror --ferror-limit=1 $(C_SOURCES) || { echo "Run: make format"; exit 1; }
	@$(RUFF) check -q
	@$(RUFF) format -q --check || { echo "Run: make format"; exit 1; }
	@PATH=$$PWD/.venv/bin:$$PATH tests/guide.py build/guide-format --format

check-asan check-tsan: check-%: deps-check
	@cmake --preset $* >/dev/null
	@cmake --build --preset $*
	@ctest --preset $*

# Replays the corpus, then looks for new inputs.
fuzz: CTEST_OUTPUT = --verbose
check-fuzz: FUZZ_SECONDS = 20
fuzz check-fuzz: deps-check
	@cmake --preset fuzz -DWEFT_FUZZ_SECONDS=$(FUZZ_SECONDS) >/dev/null
	@cmake --build --preset fuzz
	@ctest --preset fuzz $(CTEST_OUTPUT)

# A warning in words, never a failure: most machines cannot make a new record.
check-record:
	@tools/gpu_record.py --verify

# The second build has PTX for compute capability 8.0 alone, which the driver compiles for the GPU at hand.
build-ptx80: deps-test
	@cmake --preset release -B $(PTX_BUILD) $(CMAKE_FLAGS) -DWEFT_CUDA_ARCHITECTURES=80-virtual -DWEFT_TESTS=ON >/dev/null
	@cmake --build $(PTX_BUILD)

# NO_DEPS=1 takes the builds as they are, BUILD=... and PTX_BUILD=... other folders: for a machine where nothing can be installed
# or built.
gpu-record: $(if $(NO_DEPS),,build-tests build-ptx80)
	@tools/gpu_record.py --build $(BUILD) $(if $(wildcard $(PTX_BUILD)/weft),--ptx-build $(PTX_BUILD)) \
		$(if $(NO_DEPS),,--python "$$(tools/python_env.sh)") $(ARGS)

install: build
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(PREFIX)

uninstall:
	@DESTDIR=$(DESTDIR) tools/uninstall.sh $(BUILD) $(PREFIX)

# Without CUDA unless asked: code for all GPUs is compiled six times over.
wheel: deps-build
	@tools/wheel.sh dist build-wheel $(or $(PYTHON),python3) $(or $(CUDA),OFF) "$(or $(CUDA_ARCH),all)"

clean:
	rm -rf build build-asan build-tsan build-fuzz build-wheel
