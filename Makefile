# make serve | make test | make check; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(wildcard plugins/*)
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: help install serve test check format bench-smoke clean

help:                ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+: +##' Makefile | sed -E 's/:.*## */\t/' | expand -t 16

install: $(INSTALLED)  ## make .venv with the whole workspace, editable

$(INSTALLED): pyproject.toml constraints-cpu.txt $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints-cpu.txt -e '.[dev]' $(addprefix -e ,$(PACKAGES))
	$(BIN)/tpserve model get
	touch $@

serve: install       ## start the server on the embedded model; ARGS='--tp 2' adds flags
	$(BIN)/tpserve launch $(ARGS)

test: install        ## run all tests; ARGS='-k round' adds flags
	$(BIN)/python -m pytest $(ARGS)

check: install       ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install      ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-smoke: install ## the numbers of the README, as JSON
	$(BIN)/python -m tpserve.bench.smoke $(ARGS)

clean:               ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
