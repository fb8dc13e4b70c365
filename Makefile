# Needs Python 3.11+, make and git. `make demo` and `make test` create .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint mutants clean

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"dpx needs Python 3.11 or later, got {v.major}.{v.minor}; say make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[examples,test]'
	touch .venv/installed

demo: install
	$(BIN)/python -m examples.demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# A process on every core, so one thread each; what one has compiled, the others need not. Most of the time is compiling.
test: lint
	rm -rf .venv/compiled
	OMP_NUM_THREADS=1 JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
		JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
		$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadgroup

# Puts deliberate faults into the library, one at a time, and says which of them no test notices: ten to thirty minutes.
mutants: install
	$(BIN)/python -m tests.mutants

clean:
	rm -rf .venv runs
