PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-system demo test test-vllm-matrix test-frameworks fuzz check lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv and install what the project needs (PYTHON=python3.12 picks a Python)
	@$(PYTHON) tools/setup_env.py

setup-system: ## install what tests need of the system, where it may: Redis, Chromium
	@$(PYTHON) tools/setup_system.py

demo: setup ## run `saga demo` (ARGS="..." adds options)
	@$(BIN)/saga demo $(ARGS)

test: setup ## run the tests (ARGS="tests/core -k ttl" picks some)
	@$(BIN)/python -m pytest $(ARGS)

test-vllm-matrix: setup ## run the worker's tests on the other vLLM releases (ARGS="tests/worker")
	@$(BIN)/python tools/vllm_matrix.py $(ARGS)

test-frameworks: setup ## run the SDK's tests with each agent framework (ARGS="crewai autogen")
	@$(BIN)/python tools/framework_matrix.py $(ARGS)

fuzz: setup ## send the gateway 10,000 malformed requests (SAGA_FUZZ_SEED=1 others)
	@SAGA_FUZZ_REQUESTS=10000 $(BIN)/python -m pytest --timeout 1800 tests/gateway/test_fuzz.py $(ARGS)

# Stops at the first command that fails, and names it.
step = @echo "check: $(1)"; $(BIN)/$(1) || { echo "check failed: $(1)"; exit 1; }

check: setup ## lint, format, types and import rules
	$(call step,ruff check)
	$(call step,ruff format --check)
	$(call step,mypy)
	$(call step,mypy tools/setup_env.py)
	$(call step,mypy tools/vllm_matrix.py)
	$(call step,mypy tools/framework_matrix.py)
	$(call step,mypy tools/setup_system.py)
	$(call step,mypy tools/headless_chromium.py)
	$(call step,mypy tools/screenshots.py)
	$(call step,lint-imports --no-logo)

lock: ## write requirements/dev.lock anew (ARGS=--upgrade takes newer versions)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install uv
	$(BIN)/python -m uv pip compile --quiet pyproject.toml --group dev \
		--extra langchain --extra gateway --extra sim \
		--universal --python-version 3.11 --no-annotate \
		--custom-compile-command "make lock" -o requirements/dev.lock $(ARGS)

clean: ## remove .venv, .cache and what tools leave behind
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	rm -rf build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
