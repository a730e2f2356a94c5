# make chat        a conversation on the small model (ARGS="..." adds flags; piped standard input: one answer)
# make test        style, types and the default tests          (minutes)
# make test-full   the long matrix marked "full"               (half an hour)
# make test-parity side by side with pinned peers, in an environment of its own
# make lint        style and types alone
# make bench-blas  float32 products under every BLAS installed here
# make bench-host  the loop's own time a round, beside peers' loops
# make clean       remove what these made
#
# Needs Python >= 3.11 with pip. PYTHON=... chooses the interpreter that the environments are made with.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help chat test test-full test-parity lint bench-blas bench-host clean

VENV := .venv
PARITY_VENV := .venv-parity
BIN := $(VENV)/bin
MODEL ?= smollm2
ARGS ?=
PYTEST_ARGS ?=
# MLX's bundled BLAS is what bit equality is promised on, so nothing may be preloaded into a test.
PYTEST := env -u LD_PRELOAD -u MLX_SPEC_BLAS

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# --- environments -----------------------------------------------------------------------------------------------------
# A stamp is newer than pyproject.toml once its packages are installed, so a second call starts at once.

$(VENV)/.made:
	@.ci/venv $(VENV) "$(PYTHON)"
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "installing mlx-spec into $(VENV) (once; a few minutes the first time) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . </dev/null
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' </dev/null
	@touch $@

$(PARITY_VENV)/.made:
	@.ci/venv $(PARITY_VENV) "$(PYTHON)"
	@touch $@

# The peers' pins clash with ours, so mlx-spec is not installed here: tests run in $(VENV) and start peers as processes.
$(PARITY_VENV)/.installed: $(PARITY_VENV)/.made tests/parity/requirements.txt
	@echo "installing the pinned peers into $(PARITY_VENV) (once; a minute or two) ..." >&2
	@$(PARITY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/parity/requirements.txt </dev/null
	@touch $@

# --- commands ---------------------------------------------------------------------------------------------------------

chat: $(VENV)/.installed
	@$(BIN)/mlx-spec chat --model $(MODEL) $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/mypy

test: lint
	@$(PYTEST) $(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-full: $(VENV)/.dev
	@$(PYTEST) $(BIN)/python -m pytest -q -m full $(PYTEST_ARGS)

test-parity: $(VENV)/.dev $(PARITY_VENV)/.installed
	@$(PYTEST) $(BIN)/python -m pytest -q -m parity tests/parity $(PYTEST_ARGS)

bench-blas: $(VENV)/.installed
	@$(BIN)/python benchmarks/blas.py $(ARGS)

bench-host: .peers/.installed
	@PYTHONPATH=tests:.peers $(BIN)/python benchmarks/host_cost.py $(ARGS)

clean:
	@rm -rf $(VENV) $(PARITY_VENV) .peers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
