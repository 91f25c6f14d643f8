# make demo: see it.  make test: lint, types and tests.  Each makes .venv first, if there is none.
PYTHON ?= python3
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := .venv/$(SCRIPTS)
INSTALLED := .venv/installed

# The lowest torch that pyproject.toml lets in, in an environment of its own (several GB: its build for CUDA).
LOWEST := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLD := .venv-torch-$(LOWEST)

.PHONY: demo test lint types tests slow lowest lowest-smoke print-lowest ranges upstream format gpu pictures docs outputs generated clean

demo: $(INSTALLED)
	$(BIN)/attnscale demo

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

# One process for each core and one more, since tests wait for other processes a fifth of the time. One thread each:
# torch's own threads would only wait for each other. Bytecode is kept for the many processes that tests start. Kernels
# run first, in a run of their own: Triton's interpreter must be chosen before anything imports triton.
WORKERS := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations=10
INTERPRETED = $(wildcard tests/measure/test_*kernel*.py)
tests: $(INSTALLED)
	@failed=0; \
	$(PYTEST) $(INTERPRETED) || failed=1; \
	$(PYTEST) || failed=1; \
	exit $$failed

# Kills, inductor, training runs, the browser, large models from registries: all that takes too long for every day.
slow: $(INSTALLED)
	$(PYTEST) -m slow

# With the lowest torch: all tests but those of pages and documentation; or, much sooner, those that show most of
# torch: its private names, importing, the operator, watching and monitoring.
lowest: $(OLD)/installed
	$(PYTEST:$(BIN)/%=$(OLD)/$(SCRIPTS)/%) --ignore tests/show --ignore tests/docs

SMOKE = tests/test_rooms.py tests/test_torch_internals.py tests/test_operator.py tests/watching/test_watching.py \
	tests/train/test_monitor.py
lowest-smoke: $(OLD)/installed
	$(PYTEST:$(BIN)/%=$(OLD)/$(SCRIPTS)/%) $(SMOKE)

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

# On a machine with a CUDA device, torch, triton, transformers and pytest of its own. Compiling kernels takes most of the
# time, so many processes share one GPU and the kernels that triton keeps on disk: four minutes on an H200 with 16 cores.
# Other tests are not even collected: they import what such a machine may lack.
GPU_WORKERS ?= 12
GPU_TESTS = $(shell grep -rlE 'gpu|DEVICES' tests --include='test_*.py')
gpu:
	seq 0 $$(($(GPU_WORKERS) - 1)) | PYTHONPATH=src OMP_NUM_THREADS=1 xargs -P $(GPU_WORKERS) -I {} \
		env TEST_PART={}/$(GPU_WORKERS) $(PYTHON) -m pytest -q -m gpu -p no:benchmark --durations=3 $(GPU_TESTS)

pictures: $(INSTALLED)
	$(BIN)/python docs/pictures/make.py
	$(BIN)/python docs/pictures/pages.py
	$(BIN)/python docs/pictures/verdicts.py

# Into build/docs; a warning or a broken link is an error, which --quiet would hide.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Refreshes what the code blocks of README and docs print.
outputs: $(INSTALLED)
	$(BIN)/python -m tests.docs.blocks

# Writes the parts of docs that follow from the code: rules, findings, statistics, commands, claims, results.
generated: $(INSTALLED)
	$(BIN)/python docs/tools/generate.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
