# make demo: see it.  make test: lint, types and tests.  Each makes .venv first, if there is none.
PYTHON ?= python3
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := .venv/$(SCRIPTS)
INSTALLED := .venv/installed

# The lowest torch that pyproject.toml lets in, in an environment of its own (several GB: its build for CUDA).
LOWEST := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLD := .venv-torch-$(LOWEST)

.PHONY: demo test lint types tests faults lowest print-lowest ranges upstream format gpu slow pictures docs outputs clean

demo: $(INSTALLED)
	$(BIN)/attnscale demo

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

# A process a core and one more, since tests wait for other processes a fifth of the time; one thread each: torch's
# would only wait for each other. Bytecode is kept, whatever the shell says of it, for the many processes that tests
# start. Then kernels alone, whether or not others failed: Triton's interpreter is chosen before anything imports triton.
WORKERS := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
INTERPRETED = $(wildcard tests/measure/test_*kernel*.py)
tests: $(INSTALLED)
	@failed=0; \
	export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=; \
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal || failed=1; \
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(INTERPRETED) || failed=1; \
	exit $$failed

# What takes too long for every day: threads, layouts, hostile models, kills, large logs, coverage. Prints tried and
# survived, and fails if something did not. 20 minutes on two busy cores; KILLS=10 and SAMPLES=50 make it
# shorter.
faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

# The tests again with the lowest torch; what is drawn in a browser, or printed by documentation, is not its business.
lowest: $(OLD)/installed
	OMP_NUM_THREADS=1 $(OLD)/$(SCRIPTS)/pytest --numprocesses $(WORKERS) --dist worksteal --ignore tests/show --ignore tests/docs

print-lowest:
	@echo $(OLD)/installed

$(OLD)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLD)
	sed -e '/^torch==/d' -e '/^triton==/d' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/$(SCRIPTS)/pip install --quiet --disable-pip-version-check --constraint $(OLD)/constraints.txt 'torch==$(LOWEST).*' --editable '.[dev]'
	touch $@

# The wheel in clean environments, with the lowest and with the newest versions of all that it asks for but torch, which
# is borrowed; every command is run in each. Two minutes on two free cores.
ranges: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m ranges tests/test_ranges.py

# PyTorch's own tests of attention, fetched with apt-get from Debian's source package, with attnscale.attention in the
# place of SDPA, and without: what fails that SDPA passes, and why. Hours on one busy core, nearly all of it one test
# with 3,072 cases: UPSTREAM='--every 301' takes eleven of them, '--jobs 16' shares the tests out. On a GPU: make
# upstream BIN=<folder of its python>.
upstream:
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.upstream $(UPSTREAM)

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

# What the code blocks of README and docs print, written into them; and the index of the log.
outputs: $(INSTALLED)
	$(BIN)/python docs/tools/log_index.py
	$(BIN)/python docs/tools/blocks.py --write

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
