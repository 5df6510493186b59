# Two commands do all set-up: `make run` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A stamp per environment: nothing is installed again until what it depends on changes.
STAMP  := $(VENV)/.installed

.PHONY: run test fuzz soak docs clean

run: $(STAMP)
	@$(BIN)/perfed run

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/audit.py
	$(BIN)/python -m pytest -n 2 --dist worksteal

# 100,000 mutations of what comes from outside, in about ten minutes; faults are in build/fuzz.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '.[fuzz]' || echo "without atheris"
	$(BIN)/python -m tests.fuzz --record

# 2,000 rounds with dropouts, refused messages and three kills, in some minutes.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py

# The documentation, for a browser: build/site/index.html. (Browsers allow its search only from a
# server: python -m http.server -d build/site)
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
