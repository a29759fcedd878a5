# make demo: see it work. make test: lint, types, tests, as CI runs them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)

.PHONY: env demo serve-demo test chromium lint format bench docs rooms clean

env: $(VENV)/.ready

# constraints.txt keeps torch on its CPU build.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: env
	$(BIN)/maskgr demo

# A service on small models of the generated shop: http://127.0.0.1:8000
serve-demo: env
	$(BIN)/maskgr serve --demo

# The tests of the page use Debian's browser; where there is none they are skipped.
chromium:
	@command -v chromium >/dev/null \
		|| { $(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -qq -y chromium; } >/dev/null 2>&1 \
		|| echo "no chromium and no apt-get to install it with: the tests of the page are skipped"

test: lint chromium
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

# The documentation as pages under site/
docs: env
	$(BIN)/mkdocs build --quiet

rooms: env
	$(BIN)/python docs/rooms.py

clean:
	rm -rf $(VENV) runs dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
