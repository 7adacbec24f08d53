PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
ONLY ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock

.PHONY: quickstart test lint pytest smoke documents bench faults accuracy

quickstart: $(VENV)/.core
	$(BIN)/lmscale run quickstart --tier small
	@printf '%s\n' '' \
	    'The losses of every run as one picture: runs/quickstart/small/figures/curves.png' \
	    'Next:' \
	    '  . $(BIN)/activate' \
	    '  lmscale report --out site                                   # all results as pages: open site/index.html' \
	    '  lmscale claims quickstart                                   # what was expected, and what your runs say' \
	    '  lmscale predict interleaving --tier paper --system selene   # figure 12 of PTD-P, simulated beside the published'

# at the same time: the type checker has one thread; what tests start does not compile this code again
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --no-loadscope-reorder --every-claim --ignore tests/bench

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --level warning

smoke: $(VENV)/.core
	$(BIN)/python -m tests.smoke $(if $(ONLY),--only '$(ONLY)')

documents: $(VENV)/.dev
	$(BIN)/python -m tests.documents $(if $(ONLY),--only '$(ONLY)')

bench: $(VENV)/.dev
	$(BIN)/lmscale bench --keep results/bench $(if $(ONLY),--only '$(ONLY)')

faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults --keep results/faults.md $(if $(ONLY),--only '$(ONLY)')

accuracy: $(VENV)/.core
	$(BIN)/lmscale accuracy --out results

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(INSTALL) torch
	$(INSTALL) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) --editable '.[dev,notebooks,eval,hf]'
	touch $@
