PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO_INSTALLED := $(VENV)/.demo-installed
DEV_INSTALLED := $(VENV)/.dev-installed
DOCS_INSTALLED := $(VENV)/.docs-installed
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

# Three rings of tests: `test`, `landing` (with the former what .ci/run asks for), `test-all`. See CONTRIBUTING.md.
RING_FAST := not slow and not landing and not matrix
RING_LANDING := not slow and (landing or matrix)

.PHONY: help demo test landing test-all reliability gpu check docs clean

help:
	@echo "make demo      grow a network, then train a controller and compare it, with reports (six minutes on 2 cores)"
	@echo "make test      lint, import contracts, sizes and every behaviour once (about three minutes on 2 cores)"
	@echo "make landing   format, types, and the other tests that a change must pass before it lands (.ci/run runs both)"
	@echo "make test-all  all tests, the slow ones too, and that two runs of the scenarios of tools/same_bits.py agree"
	@echo "make reliability  the tests that kill, starve and feed garbage, and the figures of docs/reliability.md"
	@echo "make gpu       on a machine with CUDA: the tests that need a GPU, and the benchmarks of populations on it"
	@echo "make docs      the documentation site, built without a network into site/; links and names are checked"
	@echo "make clean     remove the virtual environment and caches (runs are kept)"

demo: $(DEMO_INSTALLED)
	@echo "First, one network grows by a fixed rule, beside the same network that does not."
	$(BIN)/python examples/grow.py --task mnist1d --host conv1d --run-dir $(DEMO)-network
	$(BIN)/esper report $(DEMO)-network
	@echo "Second, a controller learns from scratch, on many small networks, when and where to grow."
	$(BIN)/esper train --config examples/demo.yaml --run-dir $(DEMO)-controller
	@echo "Third, it plays new problems beside all other controllers, and beside itself as it was before training."
	@echo "After that, open both reports in a browser: $(DEMO)-network/report.html $(DEMO)-controller/report.html"
	$(BIN)/esper evaluate $(DEMO)-controller --instances 96 --transfer 0

check: $(DEV_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/size.py

test: $(DEV_INSTALLED)
	@start=$$(date +%s); $(MAKE) --no-print-directory check && $(BIN)/pytest -m "$(RING_FAST)"; code=$$?; \
		echo "make test took $$(($$(date +%s) - start)) s"; exit $$code

landing: $(DEV_INSTALLED)
	@start=$$(date +%s); $(BIN)/ruff format --check . && $(BIN)/pyright && $(BIN)/pytest -m "$(RING_LANDING)"; code=$$?; \
		echo "make landing took $$(($$(date +%s) - start)) s"; exit $$code

test-all: check
	$(BIN)/pytest
	$(BIN)/python tools/same_bits.py --quick

reliability: $(DEV_INSTALLED)
	$(BIN)/pytest -m reliability

# cuBLAS reads its variable once, before the first test.
gpu: $(DEV_INSTALLED)
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(BIN)/pytest -n 0 -m gpu -rs
	$(BIN)/python benchmarks/population.py --device cuda --environments 1 16 256
	$(BIN)/python benchmarks/strategies.py --device cuda --environments 1 16 256 1024

docs: $(DOCS_INSTALLED)
	$(BIN)/python -m docs.builder

clean:
	rm -rf $(VENV) site build .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Esper and what it needs into $(VENV), once"
	$(INSTALL) --editable ".[train]"
	@touch $@

$(DEV_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[dev]"
	@touch $@

$(DOCS_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[docs]"
	@touch $@
