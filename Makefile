# Everything runs in .venv, which is created by the first target that needs it. Needs Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt

export HF_HUB_OFFLINE ?= 1
export WANDB_SILENT ?= true

# Small models gain nothing from more threads: one thread in each of JOBS processes takes half the time. Three processes on
# two cores, because many tests wait for processes that they have started.
# A fixed hash seed, because xdist needs the same test names in all processes.
JOBS ?= 3
export PYTHONHASHSEED ?= 0
unit quick-tests: export OMP_NUM_THREADS = 1

# Tests start hundreds of Python processes. Without bytecode each of them would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-lm quick quick-tests test lint unit bench format clean help

help:
	@echo "make demo    train a digit classifier in about a minute"
	@echo "make demo-lm train a language model on Python's standard library in some minutes"
	@echo "make quick   lint, types and the core tests, in under two minutes"
	@echo "make test    lint, types, layers and the whole test suite"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make unit    the tests alone; make unit ARGS='-k ema' for some of them"
	@echo "make bench   the loop against a hand-written one and other libraries"
	@echo "make format  format and fix the code with ruff"

demo-lm: .venv/.dev
	$(BIN)/python examples/python_lm.py

demo: .venv/.demo
	$(BIN)/python examples/digits.py

# The default while you work: linters beside the tests of the core and one run per entry point.
QUICK := tests/engine tests/run tests/checkpointing tests/data tests/test_four_ways.py tests/test_package.py
quick: .venv/.dev
	$(MAKE) --no-print-directory -j2 lint quick-tests

quick-tests: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --ignore tests/checkpointing/test_finalize.py $(QUICK) $(ARGS)

test: lint unit

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

bench: .venv/.bench
	$(BIN)/python benchmarks/overhead.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

# uv is installed into the environment itself, so nothing is installed outside of it.
.venv/.uv:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	touch $@

.venv/.demo: .venv/.uv pyproject.toml constraints.txt
	$(UV) --editable '.[vision,samples]'
	touch $@

.venv/.dev: .venv/.uv pyproject.toml constraints.txt
	$(UV) --editable '.[dev]'
	touch $@ .venv/.demo

.venv/.bench: .venv/.dev
	$(UV) --editable '.[dev,bench]'
	touch $@
