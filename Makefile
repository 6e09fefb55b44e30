# Every target sets up ./.venv by itself. PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: study studies test check bench docs wheel clean

study: .venv/core
	$(BIN)/heedful study tsam isotonic --quick

# Every study in its quick form; some fetch data and small pretrained models.
studies: .venv/dev
	$(BIN)/heedful study --quick

test: .venv/dev
	$(BIN)/pytest

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/bench
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: .venv/dev
	$(BIN)/mkdocs build --strict

# The wheel, in an empty environment, without any extra.
wheel: .venv/dev
	rm -rf dist build/empty && $(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) scripts/check_wheel.py

clean:
	rm -rf .venv dist build site

.venv/core: pyproject.toml constraints.txt scripts/install.py
	$(PYTHON) scripts/install.py && touch $@

.venv/dev: pyproject.toml constraints.txt scripts/install.py
	$(PYTHON) scripts/install.py dev && touch $@ .venv/core

.venv/bench: .venv/dev
	$(PYTHON) scripts/install.py dev bench && touch $@
