# Two commands: `make demo` and `make test`. Each installs what it needs into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test quick fuzz torture exits lint types check load site notebook lock audit package clean help

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/core  ## Watch the bundled model generate, fill blanks and score
	$(BIN)/python examples/demo.py

test: $(VENV)/dev  ## Run the tests
	$(BIN)/python -m pytest -n auto --dist loadgroup

quick: $(VENV)/dev  ## Run the fast tests, in less than a minute on two cores
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow"

fuzz: $(VENV)/dev  ## Try mutated files for MINUTES (10); what is found is kept in tests/data_files/fuzz
	HF_HUB_OFFLINE=1 $(BIN)/python tests/fuzz.py $(or $(MINUTES),10)

torture: $(VENV)/dev  ## Fail calls on files, and kill, a short run for MINUTES (10), and resume it
	$(BIN)/python tests/torture.py $(or $(MINUTES),10)

exits: $(VENV)/dev  ## Let two sharded processes train and exit 50 times under load; kill and stop one
	$(BIN)/python tests/launched.py --faults 4 --exits 50 --load 2

lint: $(VENV)/dev  ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev  ## Check types, strictly
	$(BIN)/mypy

load: $(VENV)/dev  ## Put the server under load for a minute and print its figures
	$(BIN)/python benchmarks/serve_load.py

site: $(VENV)/docs  ## Build the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

notebook: $(VENV)/notebook  ## Execute docs/notebook.ipynb with the bundled model
	$(BIN)/python benchmarks/run_notebook.py docs/notebook.ipynb

lock: $(VENV)/release  ## Write requirements.lock: all versions, with hashes, from pyproject.toml and constraints.txt
	$(BIN)/python -m uv pip compile pyproject.toml --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
	  --constraint constraints.txt --extra data --extra dev --extra plot --extra serve --extra track \
	  --custom-compile-command "make lock" --no-annotate --quiet --output-file requirements.lock

audit: $(VENV)/release  ## Look up known vulnerabilities of requirements.lock and list licenses; needs the network
	$(BIN)/pip-licenses --python $(BIN)/python --order license
	$(BIN)/pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement requirements.lock

package: $(VENV)/release  ## Build wheel and sdist in build/dist, install the wheel in an empty environment, and try it
	rm -rf build/dist build/empty
	$(BIN)/python -m build --outdir build/dist
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/dist/*.whl
	build/empty/bin/python -m pip check
	cd build && env -u PYTHONPATH empty/bin/python ../examples/demo.py
	cd build && env -u PYTHONPATH empty/bin/diffusionbert info

check: lint types test  ## Style, types and tests

clean:  ## Remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	  f"Python {v.major}.{v.minor} is too old: 3.10 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; a few minutes on a slow line)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/core
	@echo "Installing what the tests need"
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/docs: $(VENV)/core
	@echo "Installing what the documentation needs"
	$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/notebook: $(VENV)/core
	@echo "Installing what the notebook needs"
	$(INSTALL) --editable '.[notebook]'
	@touch $@

$(VENV)/release: $(VENV)/core
	@echo "Installing what a release needs"
	$(INSTALL) --editable '.[release]'
	@touch $@
