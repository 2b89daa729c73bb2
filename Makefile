# `make demo` and `make test` need only git, make and Python >= 3.11 (choose one with PYTHON=python3.12).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MYPY_ROOT := .mypy_root

.PHONY: demo test lint install clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	# One process a core. Each begins with a run of the files, so that what their fixtures compile is compiled once, and takes over
	# from the others when it has finished.
	# DURATIONS=40 names the 40 tests and files that take the most CPU seconds.
	# Compiled sources are kept, whatever the environment says: the processes of a run import thousands of them.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto --dist worksteal $(if $(DURATIONS),--cpu-seconds=$(DURATIONS))

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# The repository root is the package `prefuse`: mypy finds it under that name through a link.
	mkdir -p $(MYPY_ROOT) && ln -sfn .. $(MYPY_ROOT)/prefuse
	MYPYPATH=$(MYPY_ROOT) $(BIN)/mypy -p prefuse

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefuse needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Programs are linked by whatever linker there is; a machine without one gets the linker inside ziglang.
	command -v ld || command -v ld.lld || command -v cc || $(BIN)/python -m pip install --quiet --constraint constraints.txt ziglang
	touch $@

clean:
	rm -rf $(VENV) $(MYPY_ROOT) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
