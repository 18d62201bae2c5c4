# `make` alone lists what can be made. Name another Python with `make PYTHON=python3.12 test`.
PYTHON ?= python3
VENV := .venv

.DEFAULT_GOAL := help
.PHONY: help setup demo test check clean

help: ## Say what can be made
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/' | expand -t 16

setup: ## Make the environment in .venv, or bring it up to date
	@$(PYTHON) scripts/setup --venv $(VENV)

demo: setup ## Run two fused ops over 4 ranks, check them, and draw who waited when
	@$(VENV)/bin/python -m iris demo

test: setup ## Run the tests that need no GPU
	@$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

check: setup ## Run everything that CI runs: format, lint, types, assembly, tests
	@scripts/check

clean: ## Remove what make made: the environment, caches, builds, demo pictures
	rm -rf $(VENV) build dist iris.egg-info .pytest_cache .mypy_cache .ruff_cache demo-*.svg
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
