# make serve | make test | make check; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
INSTALLED := $(VENV)/.installed
ARGS ?=
JOBS ?= 4
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, as in: make PYTHON=python3.11")'

# Hundreds of processes import torch: compiling it once, and not in each, halves the time of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve test check format docs sim bench-smoke clean

help:                ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | expand -t 16

install: $(INSTALLED)  ## make .venv with the whole workspace, editable, and get the embedded model

$(INSTALLED): pyproject.toml constraints-cpu.txt $(PACKAGES:=/pyproject.toml)
	test -x $(BIN)/python || { $(CHECK_PYTHON) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints-cpu.txt -e '.[dev]' $(addprefix -e ,$(PACKAGES))
	$(BIN)/tpserve model get
	@touch $@

serve: install       ## start the server on the embedded model; ARGS='--tp 2' adds flags
	$(BIN)/tpserve launch $(ARGS)

test: install        ## run all tests, JOBS=4 at a time; ARGS='-k round' adds flags
	OMP_NUM_THREADS=1 TPSERVE_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: install       ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install      ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install        ## rewrite the reference part of docs/cli.md
	$(BIN)/python scripts/cli_reference.py

sim: install         ## simulate leaders and followers until something is wrong; ARGS='--minutes 5' adds flags
	$(BIN)/python -m tpserve.testing.sim $(ARGS)

bench-smoke: install ## tpserve against transformers.generate on the embedded model, as JSON
	$(BIN)/python -m tpserve.bench.smoke $(ARGS)

clean:               ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
