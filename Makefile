# make setup | check | test | demo | determinism | mutants | soak | chaos: each sets up what it needs; only Python 3.11+ and make must be there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
SOAK_MINUTES ?= 10
SOAK_AT_LEAST ?= 100
CHAOS_SECONDS ?= 60
CHAOS_SEED ?= 6

.PHONY: setup check lint types imports unit test demo bench determinism mutants soak chaos coverage clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --build-constraint constraints.txt --group dev -e .
	touch $(STAMP)

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: setup
	$(BIN)/python -m mypy

imports: setup
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest -q -m "not slow"

check: lint types imports unit

test: check
	$(BIN)/python -m pytest -q -m slow --timeout 600

demo: setup
	$(BIN)/dledger demo

bench: setup
	$(BIN)/dledger bench produce --size 256 --inflight 64 --batch 1 --duration 10

soak: setup
	$(BIN)/dledger sim soak --minutes $(SOAK_MINUTES) --jobs 2 --at-least $(SOAK_AT_LEAST)

determinism: setup
	$(BIN)/dledger sim determinism --seeds 200 --duration 300

mutants: setup
	$(BIN)/dledger sim mutants --fast --jobs 2

chaos: setup
	$(BIN)/dledger chaos run --workload mixed --faults all --time $(CHAOS_SECONDS) --seed $(CHAOS_SEED)

coverage: setup
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
