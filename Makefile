# Two commands for newcomers: `make demo` and `make test`. Both set up what is missing.
# `make test-slow` runs the tests that take longer: trainings, crashes, documentation, browser.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint docs clean

# Profile, allocate, train: on simulated GPUs, with real images that come with scikit-learn.
DEMO := --data digits --epochs 1 --batch_sizes 32 64 128 256 --profile_steps 20 --repeats 1

demo: $(VENV)/.installed
	mkdir -p demo_out
	$(BIN)/python examples/cifar100/run_profiling.py --profile_folder demo_out/a10 --simulate A10 \
		--power_limits 300 250 200 150 100 $(DEMO)
	$(BIN)/python examples/cifar100/run_profiling.py --profile_folder demo_out/t4 --simulate T4 \
		--power_limits 70 65 60 $(DEMO)
	$(BIN)/zeus-hetero allocate --gpu1 A10 --trace1 demo_out/a10/profiling.json \
		--gpu2 T4 --trace2 demo_out/t4/profiling.json --global-batch-size 300 \
		--plan demo_out/plan.json --plots demo_out --results demo_out/A10_T4_results.csv
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 examples/cifar100/train.py \
		--plan demo_out/plan.json --simulate A10,T4 --data digits --epochs 10 --lr 0.05 \
		--report demo_out/report.json

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[all,test,integrations]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,dev,integrations]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,docs]'
	touch $@

clean:
	rm -rf $(VENV) demo_out site
