# One target per thing a person wants. Each one makes .venv first when it is missing or out of date.
#   ARGS   goes to the program behind the target:  make run ARGS="--port 8000"   make test ARGS="-k cancel"
#   PYTHON picks the interpreter that makes .venv (3.11 or newer); without it one is looked for.

SETUP := sh scripts/setup.sh
PYTHON_ENV := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint format bench bench-engine mutants clean setup setup-test

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:
	@PYTHON="$(PYTHON)" $(SETUP) all

setup-test:
	@PYTHON="$(PYTHON)" $(SETUP) test

# exec: Ctrl-C reaches the program and nothing in between, so its way of ending is the one that is seen.
run: setup ## broker, PostgreSQL and a worker with a real model, on this machine
	@exec .venv/bin/horde up $(ARGS)

test: setup-test ## every test
	@$(PYTHON_ENV) -m pytest -q $(ARGS)

lint: setup-test ## style, types, and who may import whom
	@$(PYTHON_ENV) -m ruff check .
	@$(PYTHON_ENV) -m ruff format --check .
	@$(PYTHON_ENV) -m mypy --strict
	@.venv/bin/lint-imports

format: setup-test ## put every file in shape
	@$(PYTHON_ENV) -m ruff check --fix .
	@$(PYTHON_ENV) -m ruff format .

bench: setup-test ## the numbers, as ratios measured in one run
	@$(PYTHON_ENV) -m benchmarks $(ARGS)

bench-engine: setup-test ## the batcher beside transformers on this machine (15 minutes)
	@$(PYTHON_ENV) -m benchmarks.engine $(ARGS)

mutants: setup-test ## take each guard out in turn and see that a test notices
	@$(PYTHON_ENV) -m tests.mutants $(ARGS)

clean: ## remove .venv and the tools' caches (never your data)
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .schemathesis build horde.egg-info
