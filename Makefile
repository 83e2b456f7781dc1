.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-slurm test-browser test-timm test-triton test-sanitize wheel hub-kernel fuzz lint types format bench bench-quick reproduction docs clean

PYTHON ?= python3
JOBS ?= 2
CXX_SOURCES = $(wildcard src/sinkformers/kernels/native/*.h src/sinkformers/kernels/native/*.cpp fuzzing/*.cpp)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: .venv/installed ## the main job: train a Transformer and its Sinkformers, then their table, figures and page
	$(BIN)/sinkformers run digits --jobs $(JOBS) --out runs

test: lint types ## lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q -rs

test-timm: .venv-timm/installed ## conversion of timm, vit-pytorch and x-transformers, in an environment of their own
	OMP_NUM_THREADS=1 .venv-timm/bin/python -m pytest -m timm tests/conversion -q

test-triton: .venv-triton/installed ## the Triton kernels, in an environment of their own (triton is 1 GB)
	OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest -n $(JOBS) -m triton tests/kernels tests/release -q

test-slow: .venv/installed ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-slurm: .venv/installed ## jobs of a Slurm that is started for it; needs slurm-wlm and munge (apt-get install)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm tests/slurm -q

test-browser: .venv/installed-browser ## the pages of the viewer, in Debian's chromium (apt install chromium)
	$(BIN)/python -m pytest -m browser -n 0

SEED ?= 0
SECONDS ?= 300
fuzz: .venv/installed ## random calls against a float64 oracle; SECONDS=300, SEED=0
	$(BIN)/python -m fuzzing --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

test-sanitize: .venv/installed ## the native kernels under sanitizers: address and undefined by the fuzzer, thread by eight threads
	cmake -S . -B build/sanitize-thread -DSANITIZE=thread && cmake --build build/sanitize-thread -j $(JOBS)
	build/sanitize-thread/threads build/sanitize-thread/sinkformers_native.so
	cmake -S . -B build/sanitize-address -DSANITIZE=address,undefined && cmake --build build/sanitize-address -j $(JOBS)
	$(BIN)/python -m fuzzing --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS) --backend native --no-compile --library build/sanitize-address/sinkformers_native.so

# The wheel is built from the source distribution, and tried where no compiler is found.
wheel: .venv/installed-release ## a source distribution and a wheel in dist/, tested in an environment without a compiler
	rm -rf dist build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --outdir build/wheel/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/dist/*.whl
	cp build/wheel/dist/*.tar.gz dist
	$(BIN)/python -m pytest -m wheel -q tests/release
	$(PYTHON) -m venv build/wheel/venv
	env -i HOME="$$HOME" PATH="$(CURDIR)/build/wheel/venv/bin" build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/wheel && env -i PATH="$(CURDIR)/build/wheel/venv/bin" venv/bin/python ../../release/try_wheel.py --kernels

HUB_REPO ?= sinkformers/sinkhorn-attention
hub-kernel: .venv/installed ## the Triton kernels as a repository for the Hugging Face hub, in build/hub-kernel
	$(BIN)/python -m release.hub_kernel --out build/hub-kernel --repo-id $(HUB_REPO)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

types: .venv/installed
	$(BIN)/pyright

format: .venv/installed ## fix what ruff and clang-format can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: .venv/installed ## every benchmark, then its page (about an hour on a quiet machine)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks report

bench-quick: .venv/installed ## two shapes, few rounds
	$(BIN)/python -m benchmarks --quick

reproduction: .venv/installed ## the tables and pictures of docs/reproduction.md, from results/
	$(BIN)/sinkformers report results --out build --fill docs/reproduction.md
	grep -oE '[a-z0-9-]+\.png' docs/reproduction.md | sort -u | (cd build/report && xargs cp -t $(CURDIR)/docs/assets)

docs: .venv/installed-docs ## the documentation, to site/
	$(BIN)/zensical build --clean --strict

clean: ## remove the environment and everything built
	rm -rf .venv .venv-timm .venv-triton build dist figures site .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The stamps make a second run install nothing. A change of pyproject.toml installs again, and compiles nothing.
.venv/installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard $(addprefix src/sinkformers/kernels/native/,*.cpp *.h CMakeLists.txt)) | .venv/bin/python
	$(INSTALL) --editable '.[all]'
	@touch $@

# torchvision comes with timm, and breaks parts of transformers where both are installed.
.venv-timm/installed: .venv/installed
	$(PYTHON) -m venv .venv-timm
	.venv-timm/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[timm,test]'
	@touch $@

.venv-triton/installed: .venv/installed
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[hub,triton,test]'
	@touch $@

.venv/installed-release: .venv/installed
	$(INSTALL) --editable '.[release]'
	@touch $@

.venv/installed-browser: .venv/installed
	$(INSTALL) --editable '.[browser]'
	@touch $@

.venv/installed-docs: .venv/installed
	$(INSTALL) --editable '.[docs]'
	@touch $@
