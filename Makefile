PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
ONLY ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --no-deps --require-hashes --requirement

.PHONY: quickstart test lint pytest smoke documents bench faults accuracy site lock

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

# documents, papers, experiments, verbs and API as one site, from the committed records
site: $(VENV)/.core
	$(BIN)/lmscale report --out build/site --results results

# `make lock UPGRADE=rich`, with WHEELS=FOLDER of PyTorch's CPU wheels; needs uv
lock:
	$(BIN)/python -m tests.lock $(if $(UPGRADE),--upgrade $(UPGRADE)) $(if $(WHEELS),--wheels $(WHEELS))

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# of each file that is installed a lock has the hash: PyTorch's CPU wheel where pip finds it (find-links, an index of
# one's own), else PyPI's, which then gets the libraries that it pins
$(VENV)/.core: pyproject.toml requirements-core.lock requirements-cpu.lock | $(VENV)/bin/python
	$(LOCKED) requirements-cpu.lock 2>/dev/null || true
	$(LOCKED) requirements-core.lock
	$(PIP) torch
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core requirements.lock
	$(LOCKED) requirements.lock
	touch $@

$(VENV)/.browser: $(VENV)/.core requirements-browser.lock
	$(LOCKED) requirements-browser.lock
	touch $@
