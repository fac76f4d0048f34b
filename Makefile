# `make install PYTHON=python3.12 CUDA=12.6`, `make sweep ARGS="model=llama_1b3"`, `make test PYTEST_ARGS="-k ledger"`
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
CUDA ?=

BIN := .venv/bin
INSTALL := $(PYTHON) train_entry/install/environment.py $(if $(CUDA),--cuda "$(CUDA)")
SOURCES := pyproject.toml constraints.txt
FAST := not slow and not slurm and not browser and not gpu and not libaio
ALONE := jobs or slurm or browser or gpu or libaio
PYTEST := $(BIN)/python -m pytest -ra --durations=15
SIDE_BY_SIDE := -n auto --maxprocesses=8

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install sweep test tests-together tests-alone check lint fast format bench clean

help:  ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

# install.py writes these stamps last, so an interrupted install is taken up again.
.venv/.installed: $(SOURCES)
	@$(INSTALL)

.venv/.installed-dev: $(SOURCES)
	@$(INSTALL) --dev

install: .venv/.installed  ## Make .venv with what a sweep needs, torch for this machine, DeepSpeed's CPU operators
	@echo ".venv is ready"

sweep: .venv/.installed  ## Search for the best configuration: `python sweep.py -m $(ARGS)`
	$(BIN)/python sweep.py -m $(ARGS)

test: .venv/.installed-dev  ## Every test that this machine can run, and why others were skipped
	@$(MAKE) --no-print-directory --keep-going tests-together tests-alone

# They need what README names and nothing else. Status 5: PYTEST_ARGS chose none.
tests-together: .venv/.installed-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "not ($(ALONE))" $(PYTEST_ARGS) || test $$? -eq 5

# They have the machine to themselves, or need more of it.
tests-alone: .venv/.installed-dev
	$(PYTEST) -m "$(ALONE)" $(PYTEST_ARGS) || test $$? -eq 5

check: lint fast  ## What a commit must pass: format, lint, types, fast tests

lint: .venv/.installed-dev  ## Format, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: .venv/.installed-dev  ## The tests that start no job, Slurm or browser and need no GPU
	$(PYTEST) $(SIDE_BY_SIDE) -m "$(FAST)" $(PYTEST_ARGS)

format: .venv/.installed-dev  ## Format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed-dev  ## Measure: the bench_*.py of tests/benchmarks, which `make test` leaves out
	$(BIN)/python -m pytest -o "python_files=bench_*.py" tests/benchmarks -s --timeout=0 $(PYTEST_ARGS)

clean:  ## Delete .venv and caches; never studies
	rm -rf .venv .venv.lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find analysis conf sweeps tests train_entry -name __pycache__ -prune -exec rm -rf {} +
