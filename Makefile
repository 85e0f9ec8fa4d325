# `make demo` and `make test` do all their own set-up. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(BIN)/python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("forebay needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing forebay and its dependencies into $(VENV)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[tokens]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing forebay, torch and the development tools into $(VENV) (a few minutes the first time)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.core

setup: $(VENV)/.dev  ## a .venv with everything the other targets need

demo: $(VENV)/.core  ## the whole thing on data every machine has
	$(BIN)/forebay demo

test: setup check  ## set-up, then check

check: $(VENV)/.dev  ## ruff format, ruff, mypy --strict, pytest
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/pytest -n 2

bench: $(VENV)/.dev  ## measure against named peers; prints ratios
	$(BIN)/python -m benchmarks

clean:  ## remove the .venv and what tools left behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf src/*.egg-info
