# make demo: see it.  make test: lint, types and tests.  Each makes .venv first, if there is none.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint types tests format gpu slow pictures docs outputs clean

demo: $(INSTALLED)
	$(BIN)/attnscale demo

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

# A process a core, and one thread each: torch's threads would only wait for each other.
tests: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal
	$(BIN)/pytest tests/measure/test_kernels.py  # alone: Triton's interpreter is chosen before anything imports triton

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# On a machine with a CUDA device and torch, triton and pytest of its own.
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# Fetches a trained Llama of 112 MB with npm.
slow: $(INSTALLED)
	$(BIN)/pytest -m slow

pictures: $(INSTALLED)
	$(BIN)/python docs/pictures/make.py
	$(BIN)/python docs/pictures/pages.py

# Into build/docs; a warning or a broken link is an error, which --quiet would hide.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What the code blocks of README and docs print, written into them.
outputs: $(INSTALLED)
	$(BIN)/python docs/tools/blocks.py --write

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
