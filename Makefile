# `make quickstart` and `make test` include all setup steps.
PYTHON ?= python3
VENV := .venv/bin
FAST := not (exhaustive or long or slow or cuda_release or docker or podman or sglang or megatron or browser or slurm)

.DEFAULT_GOAL := help
.PHONY: help setup prepare image real-tasks agents quickstart test test-long test-fast check docs bench view-build

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## Create the trainer and engine environments and install a sandbox
	@$(PYTHON) -m agent_rl.bootstrap trainer engine sandbox

prepare: setup ## Create and verify the quickstart's tasks
	@$(VENV)/agent-rl setup configs/quickstart.yaml

image: setup ## Build the base image of containers, if a container engine responds
	@if docker info >/dev/null 2>&1; then $(VENV)/python -m sandbox.base_image; else echo "==> image: no container engine responds, skipped"; fi

real-tasks: image ## Build tasks from real package releases (downloads their sources)
	@$(VENV)/python -m scripts.build_release_tasks --out .cache/tasks/real.jsonl

agents: setup ## Install what only tests need: mini-swe-agent, and SGLang's release for GPUs
	@$(PYTHON) -m agent_rl.bootstrap agents engine-cuda-release

quickstart: prepare ## Train a small MoE agent end to end on this machine
	@$(VENV)/agent-rl train configs/quickstart.yaml

test: prepare image agents ## Run the test suite in two processes, at most 12 minutes on two free cores
	@OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)
	$(if $(findstring -m ,$(PYTEST_ARGS)),,@echo "==> test: tests that take long were left out: make test-long")

test-long: prepare image agents ## Run the tests that take long: further whole runs, kills, model families, attacks
	@OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "long and not exhaustive" $(PYTEST_ARGS)

test-fast: prepare ## Run the tests that need no server, container engine, browser or full run
	@# tests/megatron has no such test, and its imports take seconds.
	@OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n 2 --dist loadgroup --ignore tests/megatron -m "$(FAST)" $(PYTEST_ARGS)

check: ## Run the linter, the type checker and the architecture tests
	@$(PYTHON) -m agent_rl.bootstrap trainer
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/python -m pytest -q tests/test_architecture.py

docs: ## Build the documentation into site/; fails on dead links
	@$(PYTHON) -m agent_rl.bootstrap docs
	@.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs site
	@echo "==> docs: open site/index.html"

bench: setup ## Run the benchmarks and print their ratios
	@for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(VENV)/python $$bench || exit 1; done

view-build: ## Build the viewer's page from its sources (requires Node)
	@cd agent_rl/viewer/web && npm ci --silent && npm run --silent build -- $(VIEW_OUT)
