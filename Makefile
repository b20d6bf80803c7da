# Two commands set everything up: `make quickstart` and `make test`. Both make .venv and install pinned versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint types clean

quickstart: $(VENV)/quickstart.stamp
	$(BIN)/python run_suite.py run quickstart --jobs 2
	$(BIN)/python run_suite.py report quickstart
	$(BIN)/python run_suite.py report quickstart --format png

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/test.stamp
	$(BIN)/mypy

clean:
	rm -rf $(VENV) results/local

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; call make PYTHON=python3.12 (or another)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/quickstart.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# Triton comes with torch's own build on a GPU machine; the pinned one is for machines without
$(VENV)/test.stamp: pyproject.toml constraints.txt constraints-cpu.txt $(VENV)/quickstart.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	$(BIN)/python -c "import triton" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt triton
	touch $@
