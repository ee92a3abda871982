# Every target sets up all it needs in .venv; a machine with Python (3.11 or newer) and pip is enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help demo check lint test soak bench docs package clean

help:
	@echo "make demo    train, attack and certify on real digits, and write the report"
	@echo "make check   lint, types, import contract and the fast tests, in two minutes"
	@echo "make test    all of it, the slow tests too"
	@echo "make soak    damaged files, kills, full disks: 15 minutes of one core; the table of docs/reliability.md"
	@echo "make bench   ratios of speed, measured side by side"
	@echo "make docs    the documentation as a site, in site/, links checked"
	@echo "make package the wheel and the source archive, in dist/"
	@echo "make clean   remove what the other targets made"

.venv/user: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing menet and what it needs into .venv (a few minutes the first time)"
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --editable '.[demo]'
	@echo "compiling the estimators' loops"
	@$(BIN)/python -c "import torch, menet; x = torch.ones(1, 2, 2); menet.usvt(x, x > 0); menet.nuclear_norm(x, x > 0)"
	@touch $@

.venv/developer: .venv/user
	@echo "installing the tools that tests and benchmarks need"
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/user
	@$(BIN)/menet demo

lint: .venv/developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# One thread for each of two processes: threads of both would fight for the same cores. Files are begun in the order
# of tests/conftest.py, the longest first. Bytecode is kept even where the environment says not to: many tests
# start processes of their own.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: lint
	$(PYTEST) -m "not slow"

test: lint
	$(PYTEST)

soak: .venv/developer
	$(BIN)/python tests/hostile/soak.py --write docs/reliability.md

bench: .venv/developer
	$(BIN)/python -m benchmarks

docs: .venv/user
	@$(PIP) --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/menet explore --quick --export site/explore.html

package: .venv/user
	@$(PIP) --constraint constraints.txt build
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis
