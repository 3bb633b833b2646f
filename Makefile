# Every target starts from a bare clone: the virtual environment is made when it is missing or its inputs changed.
# Without PYTHON: `python3` if that is a tried version (see requires-python), else the newest tried one that runs.
TRIED := 3.13 3.12 3.11
runs-tried = $(shell $(1) -c 'import sys; print("$(1)" if "%d.%d" % sys.version_info[:2] in "$(TRIED)".split() else "")' 2>/dev/null)
ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3 $(TRIED:%=python%),$(call runs-tried,$(name))))
endif
# Named in full, for .venv's own comes first in the recipes' PATH.
BASE := $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null)
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The tests start Python some hundred times: what one process has compiled of the package, the others read.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-suite test-portable test-rotation test-triton test-full test-environments test-dependencies test-dependencies-core dependencies check fuzz attack chaos bench bench-failover bench-link bench-reach bench-speculation bench-engine bench-engine-gpu gpu-suite mutations proto clean setup

setup: $(VENV)/.linked $(VENV)/.installed

# What the demonstration needs. The environment is made anew where PYTHON is another version than it has.
# Without compiling: what is imported is compiled then.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
EDITABLE := --no-build-isolation --config-settings editable_mode=strict
$(VENV)/.runs: pyproject.toml constraints.txt $(if $(and $(BASE),$(filter-out $(shell $(BIN)/python -V 2>/dev/null),$(shell $(BASE) -V))),.other-python)
	@PYTHON='$(or $(BASE),$(PYTHON))' TRIED='$(TRIED)' sh tests/prepare_system.sh $(MAKECMDGOALS)
	@test "$$($(BIN)/python -V 2>/dev/null)" = "$$($(BASE) -V)" || $(BASE) -m venv --clear $(VENV)
	@echo "Installing molink and what it needs into $(VENV) (two to three minutes the first time)"
	@$(PIP) 'setuptools>=77'
	@$(PIP) -e '.[gateway]' $(EDITABLE)
	@touch $@ $(VENV)/.linked

.PHONY: .other-python
.other-python:

# What tests and checks need besides.
$(VENV)/.installed: $(VENV)/.runs | $(VENV)/.linked
	@$(PIP) -e '.[dev]' $(EDITABLE)
	@touch $@

# A strict editable install is a tree of links, one for each file: it is made anew when a folder has gained or lost one.
TOPS := public shards dht routing peer client simnet
PACKAGES := $(patsubst %/__init__.py,%,$(shell find $(TOPS) -name __init__.py)) shards/models/tiny-shakespeare simnet/data \
  client/gateway/page/site client/gateway/page/site/vendor
$(VENV)/.linked: $(VENV)/.runs $(PACKAGES)
	@$(PIP) --no-deps -e . $(EDITABLE)
	@touch $@

demo: $(VENV)/.linked
	$(BIN)/molink demo --peers 4

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

PYTEST := $(BIN)/python -m pytest
# Tests that start real peers run one after the other; a worker of xdist runs them, and another one when it dies.
REAL := -m real -n 1 tests/e2e tests/attack tests/dht/node tests/simnet/emulate

# Checks run beside the tests, which wait for events for a third of their time.
test: setup
	@$(MAKE) --no-print-directory -j2 check test-suite

test-suite: setup
	$(PYTEST) -m 'not real' -n auto
	$(PYTEST) $(REAL)

# With any Python: make PYTHON=python3.13 VENV=build/python3.13 test-portable
test-portable: setup
	$(PYTEST) $(REAL) -m portable

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
	$(MAKE) test-environments test-dependencies

# The product on the oldest and on the newest releases that pyproject.toml allows. In full PyPI's torch is 3 GB each.
test-dependencies: setup
	$(BIN)/python tests/dependencies

test-dependencies-core: setup
	$(BIN)/python tests/dependencies --core

dependencies: setup
	$(BIN)/python tests/dependencies --write

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
