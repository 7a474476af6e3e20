# Everything runs in .venv, which the first target that needs it creates. Needs Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt

export HF_HUB_OFFLINE ?= 1
export WANDB_SILENT ?= true

# Tests of small models gain nothing from more threads: one thread in each of JOBS processes takes half the time. Three
# processes on two cores, since a good part of the tests waits for processes that it has started.
# One hash seed, since xdist wants the same names of tests in all processes.
JOBS ?= 3
export PYTHONHASHSEED ?= 0
unit: export OMP_NUM_THREADS = 1

.PHONY: demo demo-lm test lint unit bench format clean help

help:
	@echo "make demo    train a digit classifier in about a minute"
	@echo "make demo-lm train a language model on Python's standard library in some minutes"
	@echo "make test    lint, types, layers and the whole test suite"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make unit    the tests alone; make unit ARGS='-k ema' for some of them"
	@echo "make bench   the loop against a hand-written one and other libraries"
	@echo "make format  let ruff format and fix the code"

demo-lm: .venv/.dev
	$(BIN)/python examples/python_lm.py

demo: .venv/.demo
	$(BIN)/python examples/digits.py

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

# uv is put into the environment itself, so that nothing is installed outside of it.
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
