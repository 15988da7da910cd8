# The commands a person types are the commands CI runs.
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
export TORCH TORCH_INDEX

NATIVE_SOURCES := $(shell find native -name '*.cpp' -o -name '*.h')
BUILT_FROM := pyproject.toml scripts/setup.sh $(NATIVE_SOURCES) $(shell find native -name CMakeLists.txt)

.PHONY: serve test check check-native test-compose bench loadtest chaos env build format clean

serve: $(VENV)/run.stamp ## a whole mesh on this machine, with the default model (KVMESH_MODEL: another)
	@$(BIN)/kvmesh up --restart yes

test: env ## all tests
	@$(PY) -m pytest -q

check: env ## formatting, lint, types, layers, stubs, manifests
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(PY) -m mypy.stubtest --allowlist native/fabric/stubtest.allow shared.transfer._native
	@$(PY) -m mypy.stubtest --allowlist native/bindings/stubtest.allow shared.models._kernels
	@sh scripts/check_deploy.sh $(BIN)

check-native: env ## the native tests under AddressSanitizer and ThreadSanitizer
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh native/check.sh

test-compose: env ## the containers: image, compose, scaling and a kill under load; says so where no engine can be had
	@$(PY) -m tests.compose.check || [ $$? = 77 ]

bench: env ## the benchmarks, one after another; tables on the screen, JSON in report/
	@$(PY) -m loadtest.bench_fabric
	@$(PY) -m loadtest.bench_engine
	@$(PY) -m loadtest.bench_overlap
	@$(PY) -m loadtest.bench_interference
	@$(PY) -m loadtest.bench_speculation

loadtest: env ## Locust against a mesh on this machine: LOCUST="--users 4 --run-time 60s --rate 1"; the report is report/load.html
	@mkdir -p report
	@$(PY) -m loadtest.run_locust $(or $(LOCUST),--users 4 --run-time 60s)

chaos: env ## two minutes of random faults under load; another seed: make chaos SEED=7
	@mkdir -p report
	@$(PY) -m loadtest.chaos --minutes 2 --seed $(or $(SEED),1) --report report/chaos.json

format: env
	@$(BIN)/ruff format -q .
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/clang-format -i $(NATIVE_SOURCES)

env: $(VENV)/dev.stamp ## the virtual environment with all that tests and checks need, and the build

$(VENV)/run.stamp: $(BUILT_FROM)
	@sh scripts/setup.sh $(VENV) run
	@touch $@

$(VENV)/dev.stamp: $(BUILT_FROM)
	@sh scripts/setup.sh $(VENV) dev
	@touch $(VENV)/run.stamp $@

build: ## only the native modules, into an environment that exists
	@flock build.lock $(PY) -m pip install -q --no-build-isolation --no-deps -e .

clean:
	rm -rf build report .pytest_cache .mypy_cache .ruff_cache
