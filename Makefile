# `make demo` and `make test` are all a newcomer needs; both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.complete

.PHONY: help setup demo test lint format types slow check clean readme

help: ## List the commands
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(SETUP) ## Create .venv with everything, from constraints.txt

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	"Python 3.11 or later is needed, $(PYTHON) is %d.%d; try make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt --editable '.[export,plot,dev]'
	@touch $@

demo: $(SETUP) ## Train, export, verify, run and measure two small models
	$(BIN)/python benchmarks/demo/demo.py

test: $(SETUP) ## Run the tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

slow: $(SETUP) ## Run the tests that need minutes or gigabytes
	$(BIN)/python -m pytest -m slow

lint: $(SETUP) ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

readme: $(SETUP) ## Rewrite the command reference in README.md
	$(BIN)/python -m tests.test_readme

format: $(SETUP) ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(SETUP) ## Check types
	$(BIN)/mypy

check: lint types test slow ## lint, types, test and slow, as CI runs them

clean: ## Remove what the other commands made
	rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
