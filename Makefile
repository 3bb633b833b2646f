# Every target starts from a bare clone: the virtual environment is made when it is missing or its inputs changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The tests start Python some hundred times: what one process has compiled of the package, the others read.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-rotation test-triton test-full test-environments check fuzz attack chaos bench bench-failover bench-link bench-reach bench-speculation bench-engine bench-engine-gpu gpu-suite mutations proto clean setup

setup: $(VENV)/.linked

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "molink needs Python 3.11 or newer; $$($(PYTHON) --version) was found. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@command -v gcc >/dev/null || \
	  { echo "gcc is missing: libp2p's dependency fastecdsa is compiled on install. Try: apt-get install -y gcc libc6-dev libgmp-dev" >&2; exit 1; }
	@echo '#include <gmp.h>' | gcc -E - >/dev/null 2>&1 || \
	  { echo "gmp.h is missing: libp2p's dependency fastecdsa is compiled on install. Try: apt-get install -y libgmp-dev" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing molink and what it needs into $(VENV) (two to three minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	@touch $@

# A strict editable install is a tree of links, one for each file: it is made anew when a folder has gained or lost one.
TOPS := public shards dht routing peer client simnet
PACKAGES := $(patsubst %/__init__.py,%,$(shell find $(TOPS) -name __init__.py)) shards/models/tiny-shakespeare simnet/data \
  client/gateway/page/site client/gateway/page/site/vendor
$(VENV)/.linked: $(VENV)/.installed $(PACKAGES)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . --config-settings editable_mode=strict
	@touch $@

demo: setup
	$(BIN)/molink demo --peers 4

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

PYTEST := $(BIN)/python -m pytest
# Tests that start real peers run one after the other; a worker of xdist runs them, and another one when it dies.
REAL := -m real -n 1 tests/e2e tests/attack tests/dht/node tests/simnet/emulate

test: check
	$(PYTEST) -m 'not real' -n auto
	$(PYTEST) $(REAL)

# The long tests of real peers in an order drawn from the commit, for 40 minutes.
test-rotation: setup
	$(PYTEST) $(REAL) -m 'real and full' --minutes 40 --no-loadscope-reorder \
	  --randomly-seed=$$((0x$$(git rev-parse HEAD | cut -c 1-7)))

# The kernels of a GPU, without one. Triton is large, and what sees it installed loads it: it has a folder of its own.
TRITON := 3.7.1
build/triton/.installed-$(TRITON): $(VENV)/.installed
	@rm -rf build/triton
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/triton triton==$(TRITON)
	@touch $@

test-triton: setup build/triton/.installed-$(TRITON)
	$(PYTEST) -m 'triton and not full'

# One to two hours on two cores.
test-full: check build/triton/.installed-$(TRITON)
	$(PYTEST) -m 'not real' -n auto --full --hypothesis-profile=full --timeout=900
	$(PYTEST) $(REAL) --full --hypothesis-profile=full --timeout=900
	$(MAKE) test-environments

# On a machine with a GPU, with the Python that has torch for it: make gpu-suite PYTHON=python3.12 WHEELS=DIR ONLY='NAME ...'
gpu-suite:
	$(PYTHON) tests/gpu $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY)) $(if $(DEVICE),--device $(DEVICE))

# Each test has half an hour.
fuzz: setup
	$(PYTEST) -m fuzz --hypothesis-profile=long --timeout=1800

# As root on Linux, with iproute2 and Debian's package locales. Half an hour on two cores.
test-environments: setup
	$(PYTEST) -m environments tests/environments

chaos: setup
	$(PYTEST) -m chaos tests/e2e/changes

# In full; the fast form of each attack is in `make test`.
attack: setup
	$(PYTEST) -m attack tests/attack

# Forty mutations, for hours: make mutations SEED=N goes on with those of a seed.
mutations: setup
	$(BIN)/python tests/mutations $(if $(SEED),--seed $(SEED))

bench-speculation: setup
	$(BIN)/python tests/bench/speculation

bench-failover: setup
	$(BIN)/python tests/bench/failover.py --losses 100
	$(BIN)/python tests/bench/failover.py --losses 20 --mbps 100 --delay-ms 30
	$(BIN)/python tests/bench/copies.py
	$(BIN)/python tests/bench/copies.py --quads 3 --losses 0 --mbps 100
	$(BIN)/python tests/bench/copies.py --quads 3 --losses 0 --mbps 20

bench: setup
	$(BIN)/python tests/bench

bench-link: setup
	$(BIN)/python tests/bench/link

# As root: homes behind NATs are network namespaces.
bench-reach: setup
	$(BIN)/python tests/bench/reach

bench-engine: setup
	$(BIN)/python tests/bench/engine

bench-engine-gpu: setup
	$(BIN)/python tests/bench/engine/engine_gpu.py

proto: setup
	$(BIN)/python tests/generate_protobuf.py --write

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
