# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-quick lint bench docs dist clean browser

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /	/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@echo "compiling kernels for this machine, about a minute, once"
	@$(BIN)/hushrec doctor --compile
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@$(BIN)/hushrec doctor --compile
	@touch $@ $(VENV)/.base

run: $(VENV)/.base  ## install, train on the embedded data, evaluate, write and show the report
	$(BIN)/hushrec train --data demo --method popularity --out runs/popularity --overwrite --json >/dev/null
	$(BIN)/hushrec train --data demo --out runs/demo --overwrite
	@echo
	$(BIN)/hushrec compare runs/popularity runs/demo
	@echo
	$(BIN)/hushrec recommend runs/demo --user viewer-0001 -k 5
	@echo
	@echo "open runs/demo/report.html in a browser"

# Workers share the cores: linear algebra that spins on threads of its own would take twice the time.
# A third worker has the cores while federations of real processes wait for each other.
test: $(VENV)/.dev lint browser  ## lint, types and all tests, papers' figures among them
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

test-quick: $(VENV)/.dev lint  ## lint, types, and the unit and contract tests of what you changed
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/quick.py

lint: $(VENV)/.dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## speed and memory as ratios; writes benchmarks/latest.json
	$(BIN)/python -m benchmarks

docs: $(VENV)/.dev  ## the documentation as a site, site/index.html; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.dev  ## wheel and sdist, checked, installed in an empty venv and run from elsewhere
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; \
	  $(PYTHON) -m venv "$$place/venv"; \
	  "$$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check dist/*.whl; \
	  cd "$$place"; venv/bin/hushrec train --method popularity --out run; \
	  venv/bin/hushrec recommend run --user viewer-0001 -k 3

# The pages are tested in a real browser. Where one can be installed, it is; elsewhere those tests
# say that they were skipped and why.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || command -v google-chrome >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; } \
	  || echo "no chromium: browser tests will be skipped"

clean:  ## remove the virtual environment, caches and runs
	rm -rf $(VENV) runs dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
