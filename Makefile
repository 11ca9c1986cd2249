# From nothing: make sweep: the tiny sweep.   make test: what tells soon whether a change is right.   make test-all: all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEMO_VENV := .venv-nemo
BRIDGE_VENV := .venv-bridge
STUDY ?= tiny
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: sweep test test-all lint packages site clean
.DELETE_ON_ERROR:

sweep: $(VENV)/.installed
	$(BIN)/python -m lora_tune.sweep --study $(STUDY)

test: $(VENV)/.installed-dev packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

test-all: $(VENV)/.installed-dev $(NEMO_VENV)/.installed $(BRIDGE_VENV)/.installed packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Debian and Ubuntu split venv from python3; add it where it is missing and we may.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lora_tune needs Python 3.11 or later; set PYTHON=" >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  [ "$$(id -u)" = 0 ] || { echo "python3-venv is missing: sudo apt-get install python3-venv" >&2; exit 3; }; \
	  apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); }

# torch first and alone: the constraints pin the build without CUDA where there is no GPU.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -q -c constraints.txt torch
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[peft]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[peft,postgres,dev]'
	@touch $@

# NeMo wants older libraries than the rest: an environment of its own, for the tests of its recipe.
$(NEMO_VENV)/.installed: tests/recipes/requirements-nemo-cpu.txt constraints.txt | $(VENV)/bin/python
	@echo "installing NeMo into $(NEMO_VENV) for its tests (2 GB)"
	@$(PYTHON) -m venv $(NEMO_VENV)
	@$(NEMO_VENV)/bin/python -m pip install -q -c constraints.txt torch
	@$(NEMO_VENV)/bin/python -m pip install -q --no-deps -r tests/recipes/requirements-nemo-cpu.txt
	@touch $@

# Megatron-Bridge wants a newer Megatron-Core than NeMo: another one.
$(BRIDGE_VENV)/.installed: tests/recipes/requirements-bridge-cpu.txt constraints.txt | $(VENV)/bin/python
	@echo "installing Megatron-Bridge into $(BRIDGE_VENV) for its tests (1.3 GB)"
	@$(PYTHON) -m venv $(BRIDGE_VENV)
	@$(BRIDGE_VENV)/bin/python -m pip install -q -c constraints.txt torch
	@$(BRIDGE_VENV)/bin/python -m pip install -q --no-deps -r tests/recipes/requirements-bridge-cpu.txt
	@touch $@

# Slurm, PostgreSQL, Chromium for the tests; without root the tests say what they skip.
packages:
	@bash tests/install_packages.sh

# The documentation as a site: built without a warning, every link of every page checked.
site: $(VENV)/bin/python
	@$(BIN)/python -m pip install -q "mkdocs-material>=9.5,<10"
	$(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python docs/check_site.py build/site

clean:
	rm -rf $(VENV) $(NEMO_VENV) $(BRIDGE_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
