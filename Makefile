# Needs Python >= 3.10, a C++17 compiler and make; everything else is installed into .venv.
# Variables: PYTHON (the interpreter .venv is made with), TORCH (another version of torch than requirements.txt pins, such as
# 2.11, with the Triton that belongs to it), VENV (another environment to use), ARGS (more arguments).
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
ARGS ?=

PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
SOURCES := $(wildcard dtcomm dtcomm_autoload.py tests bench examples docs wheels setup.py)
CXX_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
NATIVE_INPUTS := $(shell find csrc cmake) CMakeLists.txt setup.py

export PATH := $(abspath $(VENV)/bin):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers often set it; without compiled files each process compiles torch's sources again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

DEPS := $(VENV)/.requirements.stamp
DEV_DEPS := $(VENV)/.requirements-dev.stamp
NATIVE := build/native.stamp
EMULATOR := build/emulator.stamp
PROGRAMS := build/programs.stamp
INSTALLED := $(VENV)/.installed.stamp
ASAN := build/asan/native.stamp

.PHONY: help demo build emulator test test-slow test-fast test-torch test-newest lint format reference docs wheels bench cuda asan fuzzer tsan device races aarch64 gpu-visit clean distclean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build  ## build, then train a small language model on two ranks, in memory and over an emulated link of 1 Gbit/s
	$(PY) -m dtcomm demo $(ARGS)

build: $(NATIVE) $(INSTALLED)  ## make .venv and compile the native modules in place

# For two cores. Four files of tests of ranks at a time, since ranks wait for half of theirs; those of one file share
# processes.
test: build $(DEV_DEPS) $(EMULATOR)  ## the tests; .ci/run adds the slow ones, sanitizers, the CUDA build, emulated devices and documents
	$(PYTEST) -n 2 -m "not slow" tests/unit tests/cuda $(ARGS)
	$(PYTEST) -n 4 --dist loadfile -m "not slow" tests/ranks $(ARGS)
	$(PYTEST) -n 3 --dist loadfile -m "not slow" tests/extensions $(ARGS)

test-slow: build $(DEV_DEPS) $(EMULATOR)  ## the tests that take long: compilers, training with frameworks, restarts
	$(PYTEST) -n 2 --dist loadfile -m slow --ignore tests/extensions tests $(ARGS)
	$(PYTEST) -n 2 --dist loadfile -m slow tests/extensions $(ARGS)

test-fast: build $(DEV_DEPS) $(EMULATOR)  ## the tests that start no processes and are not marked slow
	$(PYTEST) -n 2 -m "not slow" tests/unit $(ARGS)

# With DTCOMM_WERROR=1, as in .ci/run, the in-place build already treats warnings as errors, so lint needs no second build.
# An environment of its own for each version, with what the tests need; the native modules are those of .venv, as they
# include no header of torch. pip is asked again without its configuration, which may limit the versions of torch.
TORCH_ENV = build/torch-$(TORCH)
# Packages that test-newest leaves out, so that the environment is made sooner; tests that need them are skipped.
WITHOUT ?=

build/torch-%/installed.stamp: requirements.txt requirements-dev.txt | $(DEPS)
	$(PY) -m venv --clear $(@D)
	{ sed '/^# build/,/^$$/d' requirements.txt; sed '/^-r/d; /^# lint/,$$d' requirements-dev.txt; } | \
		sed $(call pins,$*) $(WITHOUT:%=-e '/^%==/d') >$(@D)/pins.txt
	set -- $(@D)/bin/python -m pip install -q --no-compile -r $(@D)/pins.txt; "$$@" 2>$(@D)/pip.log || PIP_CONFIG_FILE=/dev/null "$$@"
	@touch $@

test-torch:  ## the tests with another torch: make test-torch TORCH=2.15.0 (2.11.0, 2.13.0, 2.14.1), ARGS=tests/ranks/ddp for some of them
	$(if $(TORCH),,$(error test-torch: say which torch: make test-torch TORCH=2.15.0))
	@$(MAKE) --no-print-directory TORCH= build emulator
	@$(MAKE) --no-print-directory $(TORCH_ENV)/installed.stamp
	PATH="$(abspath $(TORCH_ENV)/bin):$$PATH" PYTHONPATH=$(CURDIR) $(TORCH_ENV)/bin/python -m pytest -n 3 --dist loadfile \
		-m "not slow" $(or $(ARGS),tests/unit tests/cuda tests/ranks tests/extensions)

NEWEST := 2.15.0
NEWEST_TESTS = $(addprefix tests/,unit/test_torch_compat.py unit/backend/test_registration.py ranks/pipeline \
	$(addprefix ranks/backend/,test_collectives.py test_split.py test_torch_hooks.py) ranks/ddp/test_hook.py ranks/fsdp/test_fsdp.py) \
	--deselect tests/unit/test_torch_compat.py::test_only_torch_compat_uses_private_names_of_torch

test-newest:  ## backend, DDP, FSDP and pipeline with the newest torch, where it can be installed within three minutes
	@if WITHOUT="transformers accelerate lightning scikit-learn matplotlib" \
		timeout 180 $(MAKE) --no-print-directory build/torch-$(NEWEST)/installed.stamp; then \
		$(MAKE) --no-print-directory test-torch TORCH=$(NEWEST) ARGS="$(NEWEST_TESTS)"; \
	else rm -rf build/torch-$(NEWEST); echo "test-newest: skipped, torch $(NEWEST) could not be installed here within 180 s"; fi

lint: $(DEV_DEPS)  ## ruff, mypy --strict, clang-format, compiler warnings as errors
	ruff check $(SOURCES)
	ruff format --check $(SOURCES)
	mypy
	clang-format --dry-run -Werror $(CXX_SOURCES)
	$(if $(DTCOMM_WERROR),$(MAKE) --no-print-directory build,$(call native,build/lint,DTCOMM_WERROR=1 DTCOMM_CUDA=0))

format: $(DEV_DEPS)  ## rewrite the sources the way lint wants them
	ruff check --fix-only --exit-zero $(SOURCES)
	ruff format $(SOURCES)
	clang-format -i $(CXX_SOURCES)

reference: build  ## write the reference pages that come from the code: API, options, environment variables, command line
	PYTHONPATH=$(CURDIR) $(PY) docs/reference_pages.py

docs: build $(DEV_DEPS)  ## the HTML documentation in build/docs, warnings as errors
	$(PY) -m sphinx -q -W --keep-going -j auto -b html docs build/docs
	@echo "build/docs/index.html"

# Pythons to build for: names or paths, by default 3.10 to 3.13 as far as they are installed; processors: x86_64, aarch64.
PYTHONS ?=
PROCESSORS ?= x86_64 aarch64

wheels: $(DEPS)  ## an sdist and manylinux_2_28 wheels in dist, for x86_64 and aarch64, and a smoke test of one
	$(PY) wheels/build.py $(addprefix --python ,$(PYTHONS)) --processors $(PROCESSORS) \
		--smoke $(shell sed -n 's/^torch==//p' requirements.txt) $(ARGS)

bench: build $(DEV_DEPS)  ## list the programs that measure dtcomm
	$(PY) -m bench $(ARGS)

# --- the native code ------------------------------------------------------------------------------------------

# Without make's flags: under `make -j` they name a job server, which ninja cannot reach from a recipe.
NINJA = MAKEFLAGS= cmake --build

# A build apart from the in-place one: $(call native,FOLDER,ENVIRONMENT); its modules end in FOLDER/lib/dtcomm.
native = MAKEFLAGS= $(2) $(PY) setup.py -q build_ext --build-temp $(1)/cmake --build-lib $(1)/lib

# Without --compile: Python compiles the few modules that are imported, when they are.
PIP_INSTALL = $(PY) -m pip install -q --no-compile -r
# The Triton that each torch asks for where it has CUDA; with another torch pip chooses it.
TRITON_2.11 := 3.6.0
TRITON_2.13 := 3.7.1
TRITON_2.14 := 3.8.0
TRITON_2.15 := 3.9.0
# $(call pins,TORCH) edits requirements for a version of torch, such as 2.14 or 2.14.1.
pins = -e 's/^torch==.*/torch==$(1).*/' \
	-e 's/^triton==[^;]*/triton$(addprefix ==,$(TRITON_$(basename $(1))))$(addprefix ==,$(TRITON_$(1)))/'
PINS = mkdir -p $(VENV)/pins && cp requirements.txt requirements-dev.txt $(VENV)/pins \
	$(if $(TORCH),&& sed -i $(call pins,$(TORCH)) $(VENV)/pins/requirements.txt $(VENV)/pins/requirements-dev.txt)

$(DEPS): requirements.txt
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("dtcomm needs Python >= 3.10; this is " + sys.version + "; try make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PINS)
	$(PIP_INSTALL) $(VENV)/pins/$<
	@touch $@

$(DEV_DEPS): requirements-dev.txt $(DEPS)
	$(PINS)
	$(PIP_INSTALL) $(VENV)/pins/$<
	@touch $@

$(NATIVE): $(DEPS) $(NATIVE_INPUTS)
	$(PY) setup.py -q build_ext --inplace
	@touch $@

# Installs the `dtcomm` command; --no-deps and no isolation, so that pip downloads nothing.
$(INSTALLED): pyproject.toml | $(NATIVE)
	$(PY) -m pip install -q --no-deps --no-build-isolation --editable .
	@touch $@

emulator: $(EMULATOR)  ## compile _emulator, which runs the CUDA kernels' source on this CPU

$(EMULATOR): $(NATIVE)
	$(NINJA) $(INPLACE) --target _emulator
	@touch $@

# Adds _cuda, for the architectures of release wheels, to the modules of the in-place build. The slow tests, which read its
# machine code, are in test-slow.
cuda: $(NATIVE) $(DEV_DEPS) $(EMULATOR)  ## compile _cuda without a GPU (CUDAARCHS=90-real: for one architecture), and test what needs no device
	DTCOMM_CUDA=1 $(PY) setup.py -q build_ext --inplace
	DTCOMM_CUDA=1 $(PYTEST) -m "not slow" tests/unit/test_native_build.py tests/cuda $(ARGS)

$(ASAN): $(DEV_DEPS) $(NATIVE_INPUTS)
	$(call native,build/asan,DTCOMM_SANITIZE=address$(comma)undefined DTCOMM_TESTS=ON)
	@touch $@

comma := ,
# The interpreter leaks by design, and its allocator would hide overruns from ASan.
# libstdc++ must be loaded before ASan looks up __cxa_throw, otherwise the first exception ends the process.
ASAN_ENV = DTCOMM_NATIVE_DIR=$(abspath build/asan/lib/dtcomm) \
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so.6)" \
	PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# Only tests of memory accesses run under ASan; tests of values run without it, thirty times as fast.
ASAN_TESTS = $(addprefix tests/unit/,kernels/test_memory.py kernels/test_golden.py kernels/test_corrupt_payloads.py \
	kernels/test_fuzz.py kernels/test_low_rank.py test_native_build.py) $(wildcard tests/unit/runtime/test_local*.py) \
	tests/unit/runtime/test_untrusted_peer.py tests/unit/runtime/test_parallel_connections.py tests/unit/runtime/test_plans.py \
	tests/extensions/unit/weights/test_patch.py::test_bad_patches_are_refused
# 100,000 bad patches of weights: make asan FUZZ= ASAN_TESTS=tests/extensions/unit/weights/test_patch.py ARGS="-n 0 -s -m slow"

# `make asan FUZZ=` leaves the fuzzer out.
FUZZ ?= --seconds 60

asan: $(ASAN)  ## kernels, a minute of damaged payloads and engine tests against a core built with ASan and UBSan
	$(if $(FUZZ),UBSAN_OPTIONS=print_stacktrace=1 build/asan/cmake/wheel/fuzz_payloads_test $(FUZZ))
	build/asan/cmake/wheel/hadamard_test
	build/asan/cmake/wheel/fuzz_weight_delta_test 20000
	$(ASAN_ENV) $(PYTEST) -n 2 $(ASAN_TESTS) $(ARGS)

# ThreadSanitizer's shadow memory conflicts with the address randomization of some Linux kernels.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

# The program of csrc/tests alone, for `python -m tests.stress.fuzz`.
fuzzer: $(DEPS)  ## build/fuzz/fuzz_payloads_test, with ASan and UBSan, without Python
	cmake -S . -B build/fuzz -G Ninja -DDTCOMM_SANITIZE=address,undefined -DDTCOMM_PYTHON=OFF -DDTCOMM_TESTS=ON
	$(NINJA) build/fuzz --target fuzz_payloads_test

tsan: $(DEPS)  ## csrc/tests/*.cpp that have threads under ThreadSanitizer, without Python
	cmake -S . -B build/tsan -G Ninja -DDTCOMM_SANITIZE=thread -DDTCOMM_PYTHON=OFF -DDTCOMM_TESTS=ON
	$(NINJA) build/tsan
	$(NO_ASLR) ctest --test-dir build/tsan --output-on-failure -E '^fuzz'

INPLACE = build/inplace-$(shell $(PY) -c 'import sys; print(sys.implementation.cache_tag)')

# The programs of device, races and aarch64, which may run at the same time (.ci/run). The core of the in-place build is
# reused, so only the tests themselves are compiled.
$(PROGRAMS): $(EMULATOR)
	$(NINJA) $(INPLACE) --target cuda_emulated_test race_detector_test $(FOR_PROCESSORS)
	@touch $@

.PHONY: emulator-inputs
emulator-inputs: $(PROGRAMS)
	@$(PY) -m tests.cuda.emulator_inputs $(INPLACE)

# By default 10,000 interleavings of the fused collectives, and the codec and low-rank kernels;
# `make device ORDERS="fused 100000"`: only the fused collectives, in so many; `make device ORDERS=kernels`: only the kernels.
ORDERS ?=

device: emulator-inputs  ## run the CUDA kernels' source on this CPU, and compare bytes with the CPU's kernels
	$(INPLACE)/cuda_emulated_test $(INPLACE) $(ORDERS)

# By default 330 calls of the fused collectives and some codec kernels; `make races CALLS=5000`: so many, and all codec kernels.
CALLS ?=

races: emulator-inputs  ## data races between the CUDA kernels' threads, blocks and ranks, found on this CPU
	$(INPLACE)/race_detector_test $(INPLACE) $(CALLS)

# qemu-user with the C library that comes with the cross compiler.
QEMU = qemu-aarch64 -L /usr/aarch64-linux-gnu
AARCH64_CXX = aarch64-linux-gnu-g++
FOR_PROCESSORS = kernel_digests engine_processes
DIGESTS = build/digests
# What each kernel of a processor computes, one file each: $(call digests,WHERE THE PROGRAMS ARE,PROCESSOR).
digests = for kernel in $$($(1)/kernel_digests); do \
	{ $(1)/kernel_digests $$kernel && $(1)/engine_processes $$kernel; } >$(DIGESTS)/$(2)-$$kernel || exit 1; done

aarch64: $(PROGRAMS)  ## kernels and engine for aarch64 under qemu-user, and their bytes beside this processor's
	@for tool in $(AARCH64_CXX) $(firstword $(QEMU)); do command -v $$tool >/dev/null || { echo "aarch64: $$tool was not found; on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done
	cmake -S . -B build/aarch64 -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(AARCH64_CXX) -DDTCOMM_WERROR=ON -DDTCOMM_PYTHON=OFF
	$(NINJA) build/aarch64 --target $(FOR_PROCESSORS)
	rm -rf $(DIGESTS) && mkdir -p $(DIGESTS)
	$(call digests,$(INPLACE),$(shell uname -m))
	$(call digests,$(QEMU) build/aarch64,aarch64)
	@cd $(DIGESTS) && test -s aarch64-neon -a -s $(shell uname -m)-generic && for each in *; do cmp aarch64-generic $$each || exit 1; done && \
		echo "aarch64: $$(wc -l <aarch64-neon) results are equal:" *

# --- with a GPU -----------------------------------------------------------------------------------------------

# A machine with a GPU may have no network, so the Python whose torch sees the device is used as it is, with the cmake, ninja,
# pybind11 and pytest installed beside it; without such a Python, .venv. The result is cached, as importing torch is slow.
GPU_PY = $(eval GPU_PY := $$(or $$(shell $(PYTHON) -c 'import sys, torch; torch.cuda.is_available() and print(sys.executable)' 2>/dev/null),$(abspath $(PY))))$(GPU_PY)
GPU_ARCH = $(or $(CUDAARCHS),$(shell $(GPU_PY) -c 'import torch; print("%d%d-real" % torch.cuda.get_device_capability())' 2>/dev/null))
# The compiler need not be on PATH.
GPU_PATH = $(dir $(GPU_PY)):$$PATH:/usr/local/cuda/bin

# `_cuda` for this device alone; a build for all architectures takes several times as long.
.PHONY: gpu-native
gpu-native:
	@test -x "$(GPU_PY)" || $(MAKE) build
	@$(GPU_PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu: " + sys.executable + " sees no CUDA device; give the Python whose torch does: make PYTHON=...")'
	@export PATH="$(GPU_PATH)"; for tool in cmake ninja nvcc; do command -v $$tool >/dev/null || { echo "gpu: $$tool was not found on PATH or beside $(GPU_PY)" >&2; exit 1; }; done
	PATH="$(GPU_PATH)" DTCOMM_CUDA=1 CUDAARCHS="$(GPU_ARCH)" $(GPU_PY) setup.py -q build_ext --inplace

# Where results and logs go, and the seconds of the build and all steps.
GPU_OUT ?= build/gpu
GPU_SECONDS ?= 570
gpu-visit:  ## everything that needs a GPU, in steps that each decide something; docs/how-it-works/gpu-visit.md (9.5 minutes)
	@mkdir -p $(GPU_OUT); began=$$(date +%s); $(MAKE) gpu-native && left=$$(($(GPU_SECONDS) + began - $$(date +%s))) && \
	PATH="$(GPU_PATH)" $(GPU_PY) -m bench.visit --seconds $$((left < 500 ? left : 500)) --out $(GPU_OUT) $(ARGS)

clean:  ## remove what was built; .venv stays (make distclean removes it too)
	rm -rf build dist demo-out dtcomm/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find dtcomm tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
