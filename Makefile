# Two commands for newcomers: `make demo` and `make test`. Both set up what is missing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs clean

demo: $(VENV)/.installed
	mkdir -p demo_out
	$(BIN)/zeus-hetero demo --plots demo_out --plan demo_out/plan.json --results demo_out/A10_T4_results.csv

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[all,test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,docs]'
	touch $@

clean:
	rm -rf $(VENV) demo_out site
