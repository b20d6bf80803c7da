# `make quickstart`, `make test` and `make test-all` create .venv and install pinned versions first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# one thread a worker; --dist worksteal keeps the workers busy to the end, since tests differ a hundredfold in length;
# without bytecode on disk, every worker and every process that a test starts would compile our modules again
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=10 --durations-min=1
PARALLEL := -n auto --dist worksteal

.PHONY: quickstart test quick test-all slow test-gpu faults lint links types docs clean

quickstart: $(VENV)/quickstart.stamp
	$(BIN)/python run_suite.py run quickstart --jobs 2
	$(BIN)/python run_suite.py report quickstart
	$(BIN)/python run_suite.py report quickstart --format png

# The quick tier. Tests that time the host have the processor to themselves. The limit is three times what a test may
# take (CONTRIBUTING.md), since a slow processor, or one that it shares, may need twice the time of another or more.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types quick
	$(PYTEST) tests/benchmarks --benchmark-disable -m "timing and not slow" --limit-s 30

# Called by `test`, beside the types, which one process checks.
quick: $(VENV)/test.stamp
	$(PYTEST) $(PARALLEL) -m "not slow and not timing" --limit-s 30

# The quick tier, and then all that it leaves out.
test-all: test
	$(MAKE) --no-print-directory slow

# Called by `test-all`, and by CI beside the site and with a time at which it ends: `make slow UNTIL=TIME` begins no test
# after TIME, in seconds since 1970 (tests/time_limit.py).
slow: $(VENV)/test.stamp
	$(PYTEST) $(PARALLEL) -m "slow and not timing" $(UNTIL:%=--until %)
	$(PYTEST) tests/benchmarks --benchmark-disable -m "timing and slow" $(UNTIL:%=--until %)

# The tests that need a GPU. Nearly all of their time is the compilation of kernels, which the workers share. The tests
# that take much of its memory have the GPU to themselves.
test-gpu: $(VENV)/test.stamp
	$(PYTEST) -n 16 --dist worksteal -m "not large" tests/gpu
	$(PYTEST) -m large tests/gpu

# Plants faults in a copy of the sources, one at a time: the tests must find each of them.
faults: $(VENV)/test.stamp
	$(BIN)/python -m tests.faults

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The package with its parts as links, for tools that read sources and import nothing: mypy and the documentation site.
LINKS := build/types/subquad
links:
	mkdir -p $(LINKS)
	for part in suite tasks models kernels reports run_suite.py; do ln -sfn ../../../$$part $(LINKS)/$$part; done
	for file in __init__.py __main__.py; do ln -sfn ../../../suite/package/subquad/$$file $(LINKS)/$$file; done

types: $(VENV)/test.stamp links
	$(BIN)/mypy

# The documentation site, in build/site. A dead link or a page that cannot be made is an error.
docs: $(VENV)/test.stamp links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf $(VENV) build results/local

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; call make PYTHON=python3.12 (or another)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/quickstart.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# one call for the tests and the site, because pip would look at all packages again in each; of their modules, those
# that are imported are compiled then, which are a small part of all
# on a GPU machine, Triton comes with torch's own build; the pinned version is for machines without a GPU
$(VENV)/test.stamp: pyproject.toml constraints.txt constraints-cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
		-e ".[test,docs]"
	$(BIN)/python -c "import triton" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-cpu.txt triton
	touch $@
