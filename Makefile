# SPDX-License-Identifier: Apache-2.0
#
# The two commands:   make train   make test
# Both set up everything they need on a fresh Debian or Ubuntu machine, in either order, and again.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# The versions that were tested. An empty value installs the newest ones.
CONSTRAINTS ?= constraints.txt
# What `make train` passes on, e.g. make train ARGS="--env BreakoutNoFrameskip-v4 --num_actors 64"
ARGS ?=

BIN := $(VENV)/bin
PIP_ARGS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
SYSTEM_PACKAGES := g++ make cmake pkg-config git python3-venv python3-dev \
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev
TEST_PACKAGES := libgtest-dev
SOURCES := $(shell find nest libtorchbeast third_party -name '*.cc' -o -name '*.h' -o -name '*.proto' \
  -o -name '*.cmake') CMakeLists.txt setup.py pyproject.toml requirements.txt
CXX_FILES := $(shell find nest libtorchbeast benchmarks -name '*.h' -o -name '*.cc')

.PHONY: install train test test-cpp test-python test-families lint wheel format check-locks \
  sanitize sanitize-quick clean

install: $(VENV)/installed

train: $(VENV)/installed
	$(BIN)/python -m torchbeast.polybeast --preset pong $(ARGS)

# Downloads and type checks keep one core busy, compilers the other. pytest comes last: it measures time.
test:
	$(MAKE) -j 2 lint test-cpp check-locks sanitize-quick
	$(MAKE) test-python

test-cpp: $(VENV)/test-packages
	cmake -S . -B build/tests -DCMAKE_BUILD_TYPE=Debug -DCMAKE_UNITY_BUILD=ON \
	  -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_TESTS=ON
	cmake --build build/tests -j $$(nproc)
	ctest --test-dir build/tests --output-on-failure

test-python: $(VENV)/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "not alone and not families"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/libtorchbeast -m alone

# Both programs on every family of environments, which takes minutes.
test-families: $(VENV)/installed-for-families
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sources/test_families.py tests/integration/test_family_runs.py

lint: $(VENV)/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# A wheel that carries gRPC inside, in dist/. It installs where no gRPC is.
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
	JOBS=1 scripts/sanitize.sh quick

clean:
	rm -rf $(VENV) build dist *.egg-info *.so libtorchbeast/*.so

# ---- Setting up: each step leaves a file behind and is skipped while that is newer -------------

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

# The packages of the extras, without building the core again. nle asks for one release of Gymnasium
# and no other; it works with the one that is here.
$(VENV)/installed-for-families: $(VENV)/installed-for-tests
	$(BIN)/python -m pip install $(PIP_ARGS) minigrid 'gymnasium[mujoco]'
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps nle
	touch $@
