# make demo: see it work. make test: lint, types, tests, as CI runs them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env demo test lint format bench rooms clean

env: $(VENV)/.ready

# constraints.txt keeps torch on its CPU build.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: env
	$(BIN)/maskgr demo

test: lint
	$(BIN)/pytest -n 2 --dist loadfile  # a file stays whole: its fixtures are costly

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env
	for program in benchmarks/*.py; do $(BIN)/python $$program || exit 1; done

rooms: env
	$(BIN)/python docs/rooms.py

clean:
	rm -rf $(VENV) runs dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
