# Needs make and Python 3.11 or newer; everything else is installed into .venv.

.DEFAULT_GOAL := help
.PHONY: help setup run test check sweep scale suites bench overload abuse monitor load soak torture schedulers peers compare compare-spark queues profile docs cluster \
	twin site shots clean

ifndef PYTHON
PYTHON := $(shell for each in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$each; break; }; done)
endif

# Compiled modules are kept whatever the environment says: each process of a server is up in half the time.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes a quarter of pip's time. Where it cannot be had, or pip is told of an index of packages, pip does it all.
INSTALL = { $(PIP) uv && ! $(BIN)/python -m pip config list | grep -qE '(index-url|no-index)=' \
	&& $(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python $(1); } || $(PIP) $(1)
# Versions with the hashes of their files, for each version of Python and each machine; no registry is named.
LOCK = $(BIN)/uv pip compile --quiet --system-certs --universal --generate-hashes --python-version 3.11 \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links
# Three workers for two cores: tests wait for processes and disks about as long as they compute.
PYTEST_ARGS ?= -q -n 3 --dist loadfile
SWEEP_ARGS ?= -q -n 2 --dist worksteal
ARGS ?=
SCENARIO ?= mixed
MINUTES ?= 10
WORKLOAD ?= append-100

help: ## Show this.
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.dev ## Install everything for work on the code.

run: .venv/.serve ## Run a server on port 4000 (ARGS="--port 5000" and so on).
	@exec $(BIN)/streams serve $(ARGS)

# Beside the checks, the tests are compiled once. In a fresh clone each worker would do that by itself.
test: .venv/.dev ## Run all checks and tests (PYTEST_ARGS="-x tests/core" for some).
	@$(BIN)/pytest $(PYTEST_ARGS) -n 0 --collect-only >/dev/null 2>&1 & $(MAKE) --no-print-directory check && wait
	$(BIN)/pytest $(PYTEST_ARGS)

check: .venv/.dev ## Style, types and import rules.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

sweep: .venv/.dev ## Every crash point instead of a sample; takes long.
	STREAMS_SWEEP=full $(BIN)/pytest $(SWEEP_ARGS) --timeout 14400 tests/storage tests/crash tests/model \
		tests/client/test_producer.py tests/cluster/test_router_torture.py

scale: .venv/.dev ## Five million records in one box: bounded memory, exact, quick to start. A million delayed jobs.
	STREAMS_SCALE=full $(BIN)/pytest -q -s --timeout 3600 tests/cluster/test_scale.py tests/cluster/test_delayed_jobs.py

suites: .venv/.dev ## All tests of the official S2 SDKs and the s2 command against servers here (it says how).
	$(BIN)/python -m tests.support.s2_suites $(ARGS)

bench: .venv/.dev ## Measure a server on this machine.
	$(BIN)/python -m loadtests.bench $(ARGS)

overload: .venv/.dev ## Offer a server twice what it can take for a minute.
	$(BIN)/python -m loadtests.overload $(ARGS)

abuse: .venv/.dev ## Attack a server in ten ways, and see what well-behaved clients notice; three minutes.
	$(BIN)/python -m loadtests.abuse $(ARGS)

monitor: .venv/.dev ## Run Prometheus against a server under load: every expression of the board returns data.
	$(BIN)/python -m loadtests.monitor $(ARGS)

load: .venv/.dev ## Load a server with all kinds of users, and check it (SCENARIO=tail SHAPE=spike SECONDS=60).
	$(BIN)/python -m loadtests.load $(SCENARIO) $(if $(SHAPE),--shape $(SHAPE)) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

soak: .venv/.dev ## The same for MINUTES=10, a shard killed every 30 s: nothing may be lost.
	$(BIN)/python -m loadtests.load soak --seconds $$(($(MINUTES) * 60)) $(ARGS)

torture: .venv/.dev ## Spark jobs for MINUTES=10, driver, executors, shards and gateway killed at random: each row once.
	$(BIN)/python -m loadtests.spark_torture --minutes $(MINUTES) $(ARGS)

compare-spark: .venv/.dev ## Measure Spark with boxes, Kafka, Parquet and nothing; writes docs/reference/benchmarks-spark.md.
	$(BIN)/python -m loadtests.spark_compare $(ARGS)

schedulers: .venv/.dev ## Run the pipelines of docs/howto/pipelines.md with Airflow and Dagster, installed into build/.
	$(BIN)/python -m tests.support.schedulers

peers: .venv/.dev ## Fetch Redis, Valkey, NATS, Kafka, RabbitMQ and PostgreSQL into build/, to compare with.
	$(BIN)/python -m loadtests.peers.install

compare: .venv/.dev ## Measure us beside them, and write docs/reference/benchmarks.md; at most 45 minutes.
	$(BIN)/python -m loadtests.peers.compare $(ARGS)

queues: .venv/.dev ## Measure Celery and Dramatiq on Redis beside the same on streams; minutes.
	$(BIN)/python -m loadtests.queue_bench $(ARGS)

profile: .venv/.dev ## Flame graphs of gateway and shards under a load (WORKLOAD=single, diff, watch …).
	$(BIN)/python -m loadtests.profile $(WORKLOAD) $(ARGS)

cluster: .venv/.dev ## Spark with a master, workers and executors, and Spark Connect; takes minutes.
	@$(call INSTALL,--editable '.[connect]')
	$(BIN)/python -m tests.support.spark_cluster $(ARGS)

twin: .venv/.dev ## Write the client for threads again from the one for tasks.
	$(BIN)/python -m tests.support.twin

lock: .venv/.dev ## Write deploy/server.lock and deploy/dev.lock again, from pyproject.toml (ARGS=--upgrade for newer versions).
	@$(PIP) uv
	$(LOCK) pyproject.toml --output-file deploy/server.lock $(ARGS)
	$(LOCK) pyproject.toml --extra dev --output-file deploy/dev.lock $(ARGS)

packages: .venv/.dev client-wheel ## Build the wheel and the sdist of the main distribution, and the client's wheel, into dist.
	$(BIN)/python -c "from hatchling.build import *; print(build_sdist('dist'), build_wheel('dist'))"

client-wheel: .venv/.dev ## Build the wheel of the client alone into dist.
	$(BIN)/python -m deploy.client_wheel $(ARGS)

sbom: .venv/.dev ## Write dist/streams.cdx.json: what the image installs, as CycloneDX.
	$(BIN)/python -m deploy.sbom $(ARGS)

docs: .venv/.dev ## Write the generated reference pages and the list of messages again.
	$(BIN)/streams config --markdown > docs/reference/settings.md
	$(BIN)/python -m tests.support.cli_page > docs/reference/cli.md
	$(BIN)/python -m tests.support.metrics_page > docs/reference/metrics.md
	$(BIN)/python -m tests.support.client_page > docs/reference/client.md
	$(BIN)/python -m tests.support.errors_page > docs/reference/errors.md
	$(BIN)/python -m tests.support.routes_page > docs/reference/routes.md
	$(BIN)/python -m tests.support.readme_page
	$(BIN)/python -m tests.support.limits_page
	$(BIN)/python -m tests.support.spark_page
	$(BIN)/python -m tests.support.messages > tests/docs/golden/messages.txt

# The archive has the files of the site without the folder, as STREAMS_GUIDE takes it.
site: .venv/.dev ## Build the documentation site into build/site, and build/site.zip for STREAMS_GUIDE.
	$(BIN)/sphinx-build -q -W --keep-going -E -j 2 -d build/doctrees docs build/site $(ARGS)
	@rm -f build/site.zip && cd build/site && ../../$(BIN)/python -m zipfile -c ../site.zip *
	@echo "open build/site/index.html, or: streams serve --guide build/site.zip"

shots: .venv/.dev ## Take pictures of the console into docs/images, and measure its live tail.
	$(BIN)/python -m tests.support.shots

clean: ## Remove .venv and caches. Data is never removed: that is ./streams-data, and it is yours.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; install it, or run" \
		"make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, and " \
		+ sys.executable + " is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	@printf '[bdist_wheel]\ncompression = stored\n' > .venv/wheels.cfg

.venv/.serve: pyproject.toml | .venv/bin/python
	@echo "installing what a server needs into .venv"
	@$(if $(LOCKED),$(call INSTALL,--require-hashes -r deploy/server.lock))
	@$(call INSTALL,--editable .)
	@touch $@

# Spark comes as source. Its 400 MB of jars need not be compressed between being unpacked and being installed: that
# takes as long as all the rest.
.venv/.dev: export DIST_EXTRA_CONFIG ?= $(CURDIR)/.venv/wheels.cfg
.venv/.dev: pyproject.toml | .venv/bin/python
	@echo "installing what a server, its tests and its checks need into .venv"
	@$(if $(LOCKED),$(call INSTALL,--require-hashes -r deploy/dev.lock))
	@$(call INSTALL,--editable '.[dev]')
	@touch .venv/.serve $@
