# SPDX-License-Identifier: Apache-2.0
#
# The two commands:   make train   make test
# Each installs everything it needs on a fresh Debian or Ubuntu machine; both can be repeated.

SHELL := /bin/bash
# Tests start hundreds of programs, which would all compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Only the modules that are used get compiled, when they are first imported.
export PIP_NO_COMPILE := 1
PYTHON ?= python3
VENV ?= .venv
# The tested versions. An empty value installs the newest ones.
CONSTRAINTS ?= constraints.txt
# Flags for the program in `make train`, e.g. make train ARGS="--env BreakoutNoFrameskip-v4 --num_envs 64"
ARGS ?=

BIN := $(VENV)/bin
PIP_ARGS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# Installing takes longest in a clean clone, so other compilers leave it the cores that it can use.
SPARE := nice
SYSTEM_PACKAGES := g++ make cmake pkg-config git python3-venv python3-dev \
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev
TEST_PACKAGES := libgtest-dev
SOURCES := $(shell find nest libtorchbeast third_party -name '*.cc' -o -name '*.h' -o -name '*.proto' \
  -o -name '*.cmake') CMakeLists.txt setup.py pyproject.toml requirements.txt
CXX_FILES := $(shell find nest libtorchbeast benchmarks -name '*.h' -o -name '*.cc')

.PHONY: install train test test-cpp test-python test-long test-root test-families lint types types-of-tests docs wheel format check-locks \
  sanitize sanitize-quick fuzz fuzz-peers soak clean

install: $(VENV)/installed

train: $(VENV)/installed
	$(BIN)/python -m torchbeast.polybeast --preset pong $(ARGS)

# Compilers use a core while another job downloads or waits. pytest comes last, because it measures time.
test:
	$(MAKE) -j 3 lint test-cpp check-locks sanitize-quick $(VENV)/compiled
	$(MAKE) test-python

# A library is one file, without optimisation or debugging symbols: compiling takes far longer than the tests.
test-cpp: $(VENV)/test-packages
	cmake -S . -B build/tests -DCMAKE_BUILD_TYPE=None -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_TESTS=ON \
	  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
	$(SPARE) cmake --build build/tests -j $$(nproc)
	ctest --test-dir build/tests --output-on-failure -j 4

SHORT := not long and not families
test-python: $(VENV)/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder -m "$(SHORT)"

# Runs what test-python leaves out: tests that learn, and further programs and cases of its tests.
test-long: $(VENV)/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadscope -m long

# Runs the tests that test-long skips for other users than root: hosts on a network that fails, a full disk. A user gets
# a namespace of its own for them, where the system allows that; /dev/net/tun must be writable.
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),unshare --user --map-root-user)
ROOT_TESTS := tests/integration/test_network_faults.py tests/integration/test_full_disk.py
test-root: $(VENV)/installed-for-tests
	OMP_NUM_THREADS=1 $(AS_ROOT) $(BIN)/python -m pytest --no-skips $(ROOT_TESTS)

# Runs both programs on every family of environments, which takes minutes.
test-families: $(VENV)/installed-for-families
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/collect/test_families.py tests/integration/test_family_runs.py

lint: types types-of-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

types: $(VENV)/installed-for-tests
	$(BIN)/mypy

types-of-tests: $(VENV)/installed-for-tests
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests

# Builds the documentation site in build/site: open its index.html. A broken link or a public name without a docstring
# is an error. `.venv/bin/python -m mkdocs serve` shows pages while you write them.
docs: $(VENV)/installed-for-docs
	$(BIN)/python -m mkdocs build --strict

# Builds a wheel with gRPC inside, in dist/. It installs on machines without gRPC.
wheel: $(VENV)/system-packages
	PYTHON=$(PYTHON) scripts/make_wheel.sh

format: $(VENV)/installed-for-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

check-locks: $(VENV)/installed-for-tests
	PYTHON=$(BIN)/python scripts/check_locks.sh

sanitize: $(VENV)/test-packages
	scripts/sanitize.sh full

sanitize-quick: $(VENV)/test-packages
	JOBS=1 $(SPARE) scripts/sanitize.sh quick

# Random bytes to the decoder, random servers to a learner: SECONDS of each. Needs clang.
SECONDS ?= 60
fuzz: $(VENV)/test-packages
	scripts/fuzz.sh $(SECONDS)

# Plays wrong and hostile peers, by the grammar of the protocol: with a live server, a live learner, one that hosts
# dial in to, and a live host.
fuzz-peers: $(VENV)/installed-for-tests
	for peer in server learner door host; do \
	  OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support $(BIN)/python tests/libtorchbeast/fuzz_peers.py $$peer --seconds $(SECONDS) \
	  || exit 1; done

# A fault every few seconds for MINUTES; needs root. Writes a table and a plot in build/soak. With ARGS=--dial_in the
# hosts dial in to the learner.
MINUTES ?= 60
soak: $(VENV)/installed-for-tests
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support:tests/integration $(BIN)/python tests/integration/soak.py build/soak --minutes $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info *.so libtorchbeast/*.so

# ---- Setup: each step writes a file and is skipped while that file is newer ---------------------

$(VENV)/system-packages:
	scripts/install_system_packages.sh $(SYSTEM_PACKAGES)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/test-packages: $(VENV)/system-packages
	scripts/install_system_packages.sh $(TEST_PACKAGES)
	touch $@

$(VENV)/installed: $(VENV)/system-packages $(SOURCES) $(CONSTRAINTS)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[plot,tensorboard,video]'
	touch $@

$(VENV)/installed-for-tests: $(VENV)/installed tests/requirements.txt
	$(BIN)/python -m pip install $(PIP_ARGS) -r tests/requirements.txt
	touch $@

# Compiles the modules that all processes of pytest import first, and the tests, once instead of in each process.
$(VENV)/compiled: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest --collect-only -q | tail -n 1
	touch $@

$(VENV)/installed-for-docs: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install $(PIP_ARGS) mkdocs mkdocs-material 'mkdocstrings[python]'
	touch $@

# Installs the packages of the extras without rebuilding the core. nle requires one exact release of
# Gymnasium but works with the installed one.
$(VENV)/installed-for-families: $(VENV)/installed-for-tests
	$(BIN)/python -m pip install $(PIP_ARGS) minigrid envpool pettingzoo mpe2 'gymnasium[mujoco]'
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps nle
	touch $@
