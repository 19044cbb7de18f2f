# The verbs of this repository. Each sets up what it needs: `make chat` and `make test` work in a
# fresh clone. Everything goes into .venv; constraints.txt pins the versions.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev
ASK    ?=

.DEFAULT_GOAL := help
.PHONY: help chat test check fmt test-gpu soak clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

# torch is installed first and alone: any other request for it may pull gigabytes of CUDA libraries.
$(RUN): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing nvcli into $(VENV)" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . >&2
	@touch $@

$(DEV): $(RUN)
	@echo "installing the development group" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'pip>=25.1' >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group dev >&2
	@touch $@

chat: $(RUN)  ## set up and open a chat on the built-in model; ASK='...' answers once
	@$(BIN)/nvcli chat $(if $(value ASK),--no-stdin -- "$$NVCLI_MAKE_ASK")

chat: export NVCLI_MAKE_ASK = $(value ASK)

# One torch thread a worker: threads that spin for each other cost more than they bring here. Every
# worker collects the suite, so only the plugins that it needs are loaded, and bytecode is kept.
# Files run in their own order: that by the number of tests leaves the few longest for the end.
test: export OMP_NUM_THREADS = 1
test: export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(DEV)  ## set up and run the whole suite on the CPU
	@$(BIN)/python -m pytest -p xdist -p pytest_timeout -p _hypothesis_pytestplugin \
	  -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: $(DEV)  ## ruff, mypy, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(DEV)  ## format, and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test-gpu: $(DEV)  ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

soak: $(DEV)  ## campaigns at full size, with printed seeds; random examples
	@$(BIN)/python -m pytest -m soak --timeout 3600
	@$(BIN)/python -m pytest --hypothesis-profile random $$(grep -rl hypothesis tests --include='test_*.py')

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
