# The same targets here and in CI. Whatever needs the environment makes it first.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ENGINE ?=
ARGS ?=
# Of the image: an image's name, a folder with an OCI layout, an archive of a root filesystem.
BASE ?=
N ?= 100000
TRANSFERS ?= 1000
# Processes that run tests: most of their time is waiting, so more than one process shares a core.
JOBS ?= 3
# The first Python on PATH that is new enough and not too new; looked for only where it is needed.
PYTHON ?= $(firstword $(shell for name in python3 python3.12 python3.13 python3.11; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$name"; \
	done) python3)

BIN := .venv/bin
STAMP := .venv/.kvferry-setup

.PHONY: help setup up down status test test-fast test-models mutants chaos bench-residency bench-gateway bench-neighbours bench-fair-queue bench-fairness bench-isolation bench-caches bench-routing bench-handoff bench-rag bench-retention bench-tenants bench-tier bench-plan gpu-check fuzz-tier fuzz-transfer loadtest-smoke loadtest-selfcheck helm-check k8s-check check structure fmt proto client metrics-doc config-doc plan-docs image test-image release-check build ci

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS is passed on, as in: make up ARGS="--engine sim"   make test ARGS="-k config"'
	@echo '  ENGINE=gpu sets up for NVIDIA GPUs instead of the CPU; PYTHON names an interpreter'

setup: ## Make the environment in .venv; nothing to do when it is up to date
	@$(PYTHON) tools/setup_environment.py $(if $(ENGINE),--engine $(ENGINE))

$(STAMP): pyproject.toml $(wildcard services/*/pyproject.toml) loadtest/pyproject.toml tools/setup_environment.py tools/fetch_helm.py
	@$(PYTHON) tools/setup_environment.py $(if $(ENGINE),--engine $(ENGINE))

up: $(STAMP) ## Start a cluster on this machine and ask it one question
	@$(BIN)/kvferry up $(ARGS)

down: $(STAMP) ## End it and remove all it left
	@$(BIN)/kvferry down $(ARGS)

status: $(STAMP) ## Show its members, roles and load
	@$(BIN)/kvferry status $(ARGS)

test: $(STAMP) ## Run the tests, with real models, etcd and clusters, in JOBS processes
	@$(BIN)/pytest -n $(JOBS) --durations 40 $(ARGS)

test-fast: $(STAMP) ## Run the tests that need neither a model nor a cluster
	@$(BIN)/pytest -n $(JOBS) -m "not model and not cluster and not vllm" $(ARGS)

bench-routing: $(STAMP) ## Prefix routing beside round robin; ARGS="--trace FILE" replays a Mooncake trace
	@$(BIN)/python -m bench.routing $(ARGS)

test-models: $(STAMP) ## Run all tests with engines, with every kind of attention, adapters, drafts and load formats (an hour)
	@KVFERRY_ALL_MODELS=1 $(BIN)/pytest tests/model tests/cluster/test_real_*.py tests/deploy/test_ray.py::test_real_engines_answer_over_both_protocols $(ARGS)

mutants: $(STAMP) ## Change one thing at a time in what decides access and proves pages; some test must fail (minutes); the last line is JSON
	@$(BIN)/python tools/mutants.py $(ARGS)

chaos: $(STAMP) ## Kill workers, gateways and etcd under load and show what clients saw; ARGS="--kills 5"
	@$(BIN)/python -m bench.chaos $(ARGS)

bench-residency: $(STAMP) ## Time route keys, the residency index and placement
	@$(BIN)/python -m bench.residency $(ARGS)

check: $(STAMP) ## Lint, format, types, import contract, generated code and pages, unused code, structure
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/generate_wire.py --check
	@$(BIN)/python tools/generate_client.py --check
	@$(BIN)/python tools/generate_metrics_doc.py --check
	@$(BIN)/python tools/generate_config_doc.py --check
	@$(BIN)/python tools/generate_plan_docs.py --check
	@$(BIN)/python tools/check_unused.py
	@$(BIN)/python tools/structure.py --check

structure: $(STAMP) ## Measure the sources: sizes, docstrings, the files on a request's way
	@$(BIN)/python tools/structure.py $(ARGS)

helm-check: $(STAMP) ## Check the chart and the manifests without a cluster; ARGS="--update" writes what follows from them
	@$(BIN)/python tools/helm_check.py $(ARGS)

k8s-check: $(STAMP) ## Run the life of a Helm release on the test cluster that KUBECONFIG names (ARGS="--example 1-gpu")
	@$(BIN)/python tools/k8s_check.py $(ARGS)

fmt: $(STAMP) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --exit-zero
	@$(BIN)/ruff format

proto: $(STAMP) ## Generate code from proto/
	@$(BIN)/python tools/generate_wire.py

client: $(STAMP) ## Write the synchronous client from the asynchronous one
	@$(BIN)/python tools/generate_client.py

metrics-doc: $(STAMP) ## Write docs/operator/metrics.md from the catalogue of metrics
	@$(BIN)/python tools/generate_metrics_doc.py

config-doc: $(STAMP) ## Write docs/operator/configuration.md from the configuration's models
	@$(BIN)/python tools/generate_config_doc.py

plan-docs: $(STAMP) ## Write headroom.md, examples of plan.md and tables of plan-data.md from the planner's data
	@$(BIN)/python tools/generate_plan_docs.py

bench-gateway: $(STAMP) ## Measure CPU per token and per request of one gateway; the last line is JSON
	@$(BIN)/python -m bench.gateway $(ARGS)

bench-neighbours: $(STAMP) ## Measure what the worst bodies of one client do to the streams of others; the last line is JSON
	@$(BIN)/python -m bench.neighbours $(ARGS)

bench-fairness: $(STAMP) ## Measure shares of tenants on a live cluster of simulated engines; the last line is JSON
	@$(BIN)/python -m bench.fairness $(ARGS)

bench-isolation: $(STAMP) ## Measure what the abuse of one tenant costs another one (9 minutes); the last line is JSON
	@$(BIN)/python -m bench.isolation $(ARGS)

bench-caches: $(STAMP) ## Whether the time of a request tells a tenant what another one has sent (10 minutes, 4 GiB); the last line is JSON
	@$(BIN)/python -m bench.cache_timing $(ARGS)

bench-fair-queue: $(STAMP) ## Drift of tenants in random schedules of the fair queue, and simulated clusters; the last line is JSON
	@$(BIN)/python -m bench.fair_queue $(ARGS)

bench-rag: $(STAMP) ## kvferry beside vLLM and ray.serve.llm on the published RAG load, with a report (half an hour)
	@$(BIN)/python -m bench.rag $(ARGS)

bench-plan: $(STAMP) ## kvferry plan after calibration beside real engines on this CPU (five minutes); the last line is JSON
	@$(BIN)/python -m bench.plan_reality $(ARGS)

gpu-check: ## Run on this machine's GPUs what was tested on CPUs, with a report (90 minutes); exit code 3 without a GPU; ARGS=--dry-run
	@$(PYTHON) tools/gpu_check.py $(ARGS)

bench-handoff: $(STAMP) ## Bytes/s of the KV transfer beside raw NIXL with the same bytes and descriptors; the last line is JSON
	@$(BIN)/python -m bench.kv_transfer $(ARGS)

bench-proof: $(STAMP) ## Damage transferred pages of every kind of model and look whether proofs notice (half an hour); the last line is JSON
	@$(BIN)/python -m bench.proof $(ARGS)

bench-tier: $(STAMP) ## Verified reads and writes of chunks beside fio and vLLM's loader; the last line is JSON
	@$(BIN)/python -m bench.tier $(ARGS)

bench-retention: $(STAMP) ## Time retention of tenants' pages and audit random operations; the last line is JSON
	@$(BIN)/python -m bench.retention $(ARGS)

bench-tenants: $(STAMP) ## Hits of tenants in one cache beside LRU and partitions (minutes); ARGS="--trace FILE"
	@$(BIN)/python -m bench.tenants $(ARGS)

fuzz-tier: $(STAMP) ## Spoil N chunks of the tier in every way and look for a wrong byte; the last line is JSON
	@$(BIN)/python -m bench.fuzz_tier --mutations $(N) $(ARGS)

fuzz-transfer: $(STAMP) ## Transfer N prompts between two real engines while NIXL fails; the last line is JSON
	@$(BIN)/python -m bench.fuzz_transfer --transfers $(TRANSFERS) $(ARGS)

loadtest-smoke: $(STAMP) ## A load test of a sim cluster with its report, in less than a minute
	@$(BIN)/python -m bench.rag --only kvferry-sim --scenario smoke --repeats 1 --out loadtest-results/smoke $(ARGS)

loadtest-selfcheck: $(STAMP) ## Measure the load-test harness itself; the last line is JSON
	@$(BIN)/kvferry-loadtest selfcheck $(ARGS)

image: $(STAMP) ## Build the image for ENGINE (cpu, gpu) with buildah or podman; BASE="NAME or FILE", ARGS="--archive FILE"
	@$(BIN)/python tools/build_image.py --engine $(or $(ENGINE),cpu) $(if $(BASE),--base $(BASE)) $(ARGS)

test-image: $(STAMP) ## Build the CPU image on BASE, start a cluster in it and ask it a question (as root, with buildah)
	@KVFERRY_TEST_IMAGE=1 BASE="$(BASE)" $(BIN)/pytest -s tests/deploy/test_image_build.py $(ARGS)

release-check: $(STAMP) ## Do everything of a release but publish it; ARGS="--unreleased --image BASE"
	@$(BIN)/python tools/release_check.py $(ARGS)

build: $(STAMP) ## Build the wheels and the source archives into dist/
	@for folder in . services/kvferry_*; do \
		(cd $$folder && $(CURDIR)/$(BIN)/hatchling build -d $(CURDIR)/dist) || exit; done

ci: ## What continuous integration runs
	@.ci/run
