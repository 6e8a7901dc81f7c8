# `make` or `make help` lists the targets. Everything is installed into .venv and built in target/. Outside this folder
# only the caches of pip and cargo are written.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# The profile of the wheel under test: dev has more assertions and builds faster, because it shares its libraries with
# the Rust tests (tests/repository/test_architecture.py checks that); release is what users get.
PROFILE ?= dev
BIN := $(CURDIR)/.venv/bin
CARGO := env -u MAKEFLAGS cargo
PIP := env -u MAKEFLAGS $(BIN)/python -m pip --quiet --disable-pip-version-check
# uv, where it is found, installs from its cache in seconds.
INSTALL := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$(PIP) install)
# The architectures of a release.
ARCHITECTURES ?= x86_64 aarch64
TARGET := $(CURDIR)/target
# The sources of a wheel: it is rebuilt only when one of them changes.
SOURCES := $(wildcard Cargo.toml Cargo.lock pyproject.toml) \
           $(shell find rust python protos examples -type f -not -path '*/__pycache__/*' -not -name '*.so')
# Those of the lab's wheel, which is pure Python and built in seconds.
LAB := lab/pyproject.toml $(shell find lab/fastps_lab -type f -not -path '*/__pycache__/*')
# This includes the wheel's own crate, which has no Rust tests, so that dependencies have the same features as in the wheel
# and are built once. loom would change their features (see rust/transport/loom/Cargo.toml).
RUST_TESTED := --workspace --exclude fastps-transport-loom
export PYO3_PYTHON := $(BIN)/python
# Only what cargo builds goes elsewhere if CARGO_TARGET_DIR says so, as in .ci/run.
export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
# cargo nextest runs the tests of all programs side by side, cargo test one program after the other.
RUST_TESTS := $(if $(shell command -v cargo-nextest),nextest run --cargo-quiet --test-threads=8,test)
TIMED := .ci/timed
# Packages are installed uncompiled and compiled on first import: tests import only a small part of torch and JAX.
unexport PYTHONDONTWRITEBYTECODE
ifdef CI
# A machine that builds once gains nothing from incremental compilation.
export CARGO_INCREMENTAL := 0
endif

# The tests of `make check` start no other process and import neither torch nor a browser. Those of `make test` cover
# what holds the weights; `make test-all` adds every other file.
CHECKED := optim store test_simulate.py repository/test_architecture.py
WITH_PROCESSES := store/test_fork.py store/test_shared_store.py store/test_handles.py
TESTED := adapters durable faults grpc optim security server store worker repository/test_architecture.py
FOLDERS := $(sort $(patsubst tests/%/,%,$(dir $(wildcard tests/*/test_*.py))))
REST := $(filter-out $(TESTED) repository,$(FOLDERS) $(patsubst tests/%,%,$(wildcard tests/test_*.py tests/repository/test_*.py))) ../lab/tests

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## List the targets; the first ones are enough for most changes
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

dev: .venv/.made | tools ## Build and install in place (editable), with everything that tests need
	$(BIN)/python .ci/requirements.py test test-rest demo > .venv/test.txt
	$(INSTALL) --requirement .venv/test.txt --editable . --editable lab
	@rm -f .venv/.demo .venv/.test-* .venv/.rest-*

check: .venv/.test-$(PROFILE) ## Formatting, lints and the tests without processes: some minutes, for each commit
	@$(MAKE) --no-print-directory lint-rust lint-python
	RUST_TEST_THREADS=8 $(CARGO) test --locked --quiet -p fastps-core -p fastps-durable -p fastps-transport
	@$(MAKE) --no-print-directory pytest REPORT=check FILES="$(CHECKED) $(WITH_PROCESSES:%=--ignore=%)"

test: ## What holds the weights: lints, Rust, store, server, workers, torch, durability, faults; says what it leaves out
	@$(MAKE) --no-print-directory --jobs=2 tests beside-tests
	@$(BIN)/python .ci/skipped.py "make test-all: $(REST); make checkers" $(TARGET)/rust-tests.txt $(TARGET)/pytest-test.xml

test-all: test ## All tests: what make test runs, then commands, browser, model parallelism, documentation, ...
	@$(MAKE) --no-print-directory rest

demo: .venv/.demo ## Train a real model on 2 servers and 4 worker processes; options: make demo ARGS="--codec int8"
	@$(BIN)/fastps demo $(ARGS)

docs: .venv/.docs ## Build the documentation into target/site and the Rust reference into target/doc
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(TARGET)/site
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --workspace --quiet

demo-parallel: .venv/.test-release ## Train 2 replicas of a model in 2 parts, one of them killed half-way; options: make demo-parallel ARGS="--partition rows"
	@$(BIN)/python examples/model_parallel_demo.py $(ARGS)

rest: .venv/.rest-$(PROFILE) # the other half of test-all
	@$(MAKE) --no-print-directory pytest REPORT=rest FILES="$(REST)"
	@$(BIN)/python .ci/skipped.py "make checkers" $(TARGET)/rust-tests.txt $(TARGET)/pytest-test.xml $(TARGET)/pytest-rest.xml

# Two targets at a time, because one leaves a core idle; cargo chooses its own number of jobs.
tests: .venv/.test-$(PROFILE)
	@$(MAKE) --no-print-directory test-rust
	@$(MAKE) --no-print-directory pytest REPORT=test FILES="$(TESTED)"

# At low priority: tests wait for sockets and have deadlines, lints have none.
# Clippy builds in the same folder as the tests, so one of the two waits.
beside-tests: .venv/.test-$(PROFILE)
	@nice $(MAKE) --no-print-directory lint-python lint-rust

lint: .venv/.test-$(PROFILE) ## Check formatting, lints, types and the stub
	@$(MAKE) --no-print-directory lint-rust lint-python
	$(BIN)/python -m mypy.stubtest fastps._fastps

lint-rust: .venv/.made
	cargo fmt --all --check -- --files-with-diff
	@$(TIMED) "clippy" $(CARGO) clippy --locked --workspace --all-targets --all-features --quiet -- -D warnings
	@if command -v cargo-deny >/dev/null; then cargo deny --log-level error check licenses bans sources; \
	else echo "cargo-deny is not installed: licences and sources of dependencies are not checked"; fi

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(TIMED) "mypy" $(BIN)/mypy

lint-ci: $(CARGO_TARGET_DIR)/go/bin/actionlint ## Check the workflows of .github; needs go
	$< -color

$(CARGO_TARGET_DIR)/go/bin/actionlint:
	@command -v go >/dev/null || { echo "fastps: actionlint needs go, which was not found" >&2; exit 1; }
	GOBIN=$(@D) GOMODCACHE=$(CARGO_TARGET_DIR)/go/mod GOCACHE=$(CARGO_TARGET_DIR)/go/cache GOFLAGS=-modcacherw CGO_ENABLED=0 \
	  go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

protos-image: $(CARGO_TARGET_DIR)/go/bin/buf ## Renew protos/image.binpb, which the proto must not break, and print what changed; needs go
	cd protos && $< lint && { $< breaking --against image.binpb || [ -n "$(BREAK)" ]; }
	cd protos && diff -u <($< build image.binpb -o -\#format=txtpb) <($< build --exclude-source-info -o -\#format=txtpb) || true
	cd protos && $< build --exclude-source-info -o image.binpb

$(CARGO_TARGET_DIR)/go/bin/buf:
	@command -v go >/dev/null || { echo "fastps: buf needs go, which was not found" >&2; exit 1; }
	GOBIN=$(@D) GOMODCACHE=$(CARGO_TARGET_DIR)/go/mod GOCACHE=$(CARGO_TARGET_DIR)/go/cache GOFLAGS=-modcacherw CGO_ENABLED=0 \
	  go install github.com/bufbuild/buf/cmd/buf@v1.75.0

nightly: .venv/.rest-$(PROFILE) ## The tests that test-all leaves out because they run long
	@FASTPS_NIGHTLY=1 $(MAKE) --no-print-directory pytest REPORT=nightly FILES="-m nightly . ../lab/tests"

test-rust: # more threads than cores, because many tests wait for a socket
	@mkdir -p $(TARGET)
	@$(TIMED) "build of the Rust tests" $(CARGO) test --locked --quiet $(RUST_TESTED) --no-run
	@RUST_TEST_THREADS=8 $(TIMED) "Rust tests" $(CARGO) $(RUST_TESTS) --locked $(RUST_TESTED) 2>&1 | tee $(TARGET)/rust-tests.txt

test-python: .venv/.rest-$(PROFILE)
	@$(MAKE) --no-print-directory pytest REPORT=python FILES="$(TESTED) $(REST)"

# In tests/, so that the installed package is tested; more processes than cores, because many tests wait.
pytest:
	cd tests && FASTPS_WHEEL="$$(ls $(TARGET)/wheel/$(PROFILE)/*.whl)" \
	  ../$(TIMED) "Python tests of make $(REPORT)" \
	  $(BIN)/python -m pytest --numprocesses=4 --dist=worksteal --junitxml=$(TARGET)/pytest-$(REPORT).xml $(FILES) $(ARGS)

test-clients: .venv/.test-$(PROFILE) ## Run the clients of clients/ against real servers; needs go
	@$(MAKE) --no-print-directory pytest REPORT=clients FILES=clients

checkers: .venv/.made ## loom, ThreadSanitizer, Miri and NEON
	@for checker in loom tsan miri neon; do $(TIMED) $$checker $(MAKE) --no-print-directory $$checker; done

times: .venv/.made ## Print how long each stage of the last run took, each program and folder of tests, and the slowest tests
	@$(BIN)/python .ci/times.py

loom: ## Check the models of the core's locks and claims in every order of their steps
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS="--cfg loom" cargo test --locked --quiet -p fastps-core --test loom \
	  --config profile.dev.package.fastps-core.opt-level=1 # most of the time is spent in loom, not in the core
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom cargo test --locked --quiet -p fastps-transport-loom

tsan: ## Check the core's threads for data races with ThreadSanitizer
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/tsan .ci/tsan

miri: ## Check the core for undefined behaviour with Miri, if it is installed
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/miri .ci/miri

neon: ## Compile the vector load and store for AArch64
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/neon $(PYTHON) .ci/neon.py

live: ## Build the WebAssembly of the live page with Debian's compiler, put it into the package, and write its vectors
	FASTPS_WRITE_VECTORS=1 $(CARGO) test --locked --quiet -p fastps-live vectors
	.ci/live lab/fastps_lab/live/page/fastps.wasm

live-check: .venv/.rest-$(PROFILE) ## Build the WebAssembly where its compiler can be had, and compare runs of it with the vectors
	.ci/live $(TARGET)/fastps.wasm
	$(CARGO) test --locked --quiet -p fastps-live vectors
	FASTPS_LIVE_MODULE=$$(ls $(TARGET)/fastps.wasm 2>/dev/null) $(BIN)/pytest -n0 lab/tests/live/test_live_vectors.py

bench: .venv/.test-release ## Measure push + pull against raw sockets and write benchmarks/README.md
	$(BIN)/python benchmarks/transport.py --output benchmarks/README.md $(ARGS)

bench-kernels: .venv/.test-release ## Measure optimizers, codecs and slices against plain C and torch and write benchmarks/README.md
	$(BIN)/python benchmarks/kernels.py --output benchmarks/README.md $(ARGS)

bench-hogwild: .venv/.rest-release ## Measure the estimators against scikit-learn and plain C and write benchmarks/README.md
	$(BIN)/python benchmarks/hogwild.py --output benchmarks/README.md $(ARGS)

bench-embedding: .venv/.test-release ## Measure sparse pushes and pulls of a large table against sockets and NumPy and write benchmarks/README.md
	$(BIN)/python benchmarks/embedding.py --output benchmarks/README.md $(ARGS)

bench-durable: .venv/.test-release ## Measure snapshots, the log and a start against plain files and write benchmarks/README.md
	$(BIN)/python benchmarks/durable.py --output benchmarks/README.md $(ARGS)

bench-training: .venv/.test-release ## Measure the PyTorch optimizer against torch's own and write benchmarks/README.md
	$(BIN)/python benchmarks/training.py --output benchmarks/README.md $(ARGS)

bench-connections: .venv/.test-release ## Measure the cost of idle and of many connections and write benchmarks/README.md
	$(BIN)/python benchmarks/connections.py --output benchmarks/README.md $(ARGS)

bench-operations: .venv/.test-release ## Measure the cost of tokens and of scraped metrics and write benchmarks/README.md
	$(BIN)/python benchmarks/operations.py --output benchmarks/README.md $(ARGS)

bench-clients: .venv/.test-release ## Measure steps of the Go client against a Go server that returns the same messages; needs go
	$(BIN)/python benchmarks/go_client.py $(ARGS)

bench-shared: .venv/.test-release ## Measure processes that train in one shared store against torch's and write benchmarks/README.md
	$(BIN)/python benchmarks/shared_store.py --output benchmarks/README.md $(ARGS)

second-order: .venv/.test-release ## Compare the batch optimizers with scipy's, write benchmarks/README.md, and run all sizes and kills for the same bits
	$(BIN)/python benchmarks/second_order.py --output benchmarks/README.md $(ARGS)
	cd tests && FASTPS_SECOND_ORDER=1 $(BIN)/python -m pytest optimize faults/test_minimize_killed.py

scipy-tests: .venv/.test-release ## Run scipy's own tests of CG and L-BFGS-B with fastps.optimize; options: make scipy-tests ARGS="-k callback"
	$(BIN)/python tests/long/scipy_tests.py $(ARGS)

bench-rl: .venv/.test-release ## Measure reinforcement learning with one and two processes and write benchmarks/README.md
	$(BIN)/python benchmarks/rl.py --output benchmarks/README.md $(ARGS)

bench-parallel: .venv/.test-release ## Measure models in two parts against one, and messages against gloo, and write benchmarks/README.md
	$(BIN)/python benchmarks/parallel.py --output benchmarks/README.md $(ARGS)

bench-live: .venv/.test-release ## Measure the script work per frame of the live page in Chromium and write benchmarks/README.md
	$(BIN)/python benchmarks/live.py --output benchmarks/README.md $(ARGS)

gpu-check: .venv/.test-release ## Build the wheel for benchmarks/gpu.py, collect it with scripts and images, and print the command for a GPU machine
	@mkdir -p $(TARGET)
	@rm -f $(TARGET)/images.npz
	@if [ -d "$(FASTPS_DATA_DIR)/cifar10" ]; then cd benchmarks && \
	  $(BIN)/python -m device.images "$(FASTPS_DATA_DIR)/cifar10" $(TARGET)/images.npz; \
	else echo "FASTPS_DATA_DIR has no cifar10: the row of CIFAR-10 will be skipped"; fi
	@$(BIN)/python benchmarks/gpu.py --collect $(TARGET)/gpu-check --wheel $(TARGET)/wheel/release/*.whl \
	  $$(ls $(TARGET)/images.npz 2>/dev/null | sed 's/^/--images /')

acceptance: .venv/.demo ## Run the demo on 10 seeds with every codec and check accuracy and ledger
	$(BIN)/python lab/tests/long/acceptance.py $(ARGS)

repro: .venv/.rest-release ## Check all claims in the full form, with data from FASTPS_DATA_DIR, into target/repro; options: make repro ARGS="--jobs 4"
	$(BIN)/fastps-lab repro all --dataset-dir "$(FASTPS_DATA_DIR)" --out $(TARGET)/repro $(ARGS)

acceptance-synthetic: .venv/.test-release ## Check on 5 seeds of MNIST what synthetic gradients learn, with data from FASTPS_DATA_DIR, into target/repro
	$(BIN)/fastps-lab repro synthetic-gradients --dataset-dir "$(FASTPS_DATA_DIR)" --out $(TARGET)/repro $(ARGS)

acceptance-rl: .venv/.rest-release ## Check on all seeds what reinforcement learning learns; options: make acceptance-rl ARGS="--only es"
	$(BIN)/fastps-lab repro rl --out $(TARGET)/repro
	$(BIN)/python lab/tests/long/acceptance_rl.py $(ARGS)

gorila-grid: .venv/.test-release ## Train 12 settings of Gorila with 1, 4 and 10 bundles; options: make gorila-grid ARGS="--part bundles"
	$(BIN)/python lab/tests/long/gorila_grid.py $(ARGS)

test-engines: .venv/.test-$(PROFILE) ## Run examples/engines on Ray, Dask, Lightning, Accelerate, and Slurm; the image in Docker; charts against their schemas
	$(BIN)/python .ci/requirements.py test-engines > .venv/engines.txt && $(INSTALL) --requirement .venv/engines.txt
	@command -v helm >/dev/null || $(MAKE) --no-print-directory $(CARGO_TARGET_DIR)/go/bin/helm || true
	cd tests && FASTPS_WHEEL="$$(ls $(TARGET)/wheel/$(PROFILE)/*.whl)" \
	  $(BIN)/python -m pytest long/engines.py long/slurm.py long/image.py engines/test_charts.py engines/test_kubeflow.py $(ARGS)

# Without optimizations and debug information it is built with less work.
$(CARGO_TARGET_DIR)/go/bin/helm:
	@command -v go >/dev/null || { echo "fastps: helm needs go, which was not found" >&2; exit 1; }
	GOBIN=$(@D) GOMODCACHE=$(CARGO_TARGET_DIR)/go/mod GOCACHE=$(CARGO_TARGET_DIR)/go/cache GOFLAGS=-modcacherw CGO_ENABLED=0 \
	  go install -gcflags='all=-N -l -dwarf=false' -ldflags='-s -w' helm.sh/helm/v3/cmd/helm@v3.22.0

wheel: | tools ## Build the wheel for this architecture that needs no compiler into target/dist, and print the line that installs it
	PYTHON="$(PYTHON)" .ci/wheel $(TARGET)/dist $$(uname -m)
	@echo "pip install '$$(ls -t $(TARGET)/dist/*_$$(uname -m).whl | head -1)[torch,demo]'"

release: | tools ## Build wheels and static servers for x86-64 and AArch64 into target/dist, and try them; options: make release ARCHITECTURES=x86_64
	PYTHON="$(PYTHON)" .ci/release $(TARGET)/dist $(ARCHITECTURES)
	$(PYTHON) tests/long/release.py $(TARGET)/dist

neon-run: ## Run the core's tests for AArch64 under qemu
	.ci/neon-run

release-twice: release ## Build them again in another folder, and compare every byte
	.ci/release-twice $(TARGET)/dist $(ARCHITECTURES)

compat: .venv/.rest-$(PROFILE) ## Run the last release and this version with each other: verbs, conformance suite, data directories, checkpoints, worker files
	last=$$(PYTHON=$(BIN)/python .ci/last-release) && cd tests && \
	  FASTPS_LAST="$$last" $(BIN)/python -m pytest long/compat.py $(ARGS)

sklearn-tests: .venv/.rest-$(PROFILE) ## Run scikit-learn's tests of its SGD estimators with ours; options: make sklearn-tests ARGS="-k average"
	$(BIN)/python tests/long/sklearn_sgd.py $(ARGS)

training: .venv/.test-release ## Train MNIST with three uneven workers, kills and restarts, beside 5 plain seeds; options: make training ARGS="--data digits"
	$(BIN)/python lab/tests/long/training.py $(ARGS)

mutants: .venv/.rest-$(PROFILE) ## Seed one fault at a time and check that the tests fail
	$(BIN)/python tests/long/mutants.py $(ARGS)

torture: .venv/.test-release ## Run servers and clients under faults, 10 seeds of 5 minutes, and write docs/internals/reliability.md; options: make torture SEEDS="1 2" SECONDS=60
	$(BIN)/python lab/tests/long/reliability.py --seeds $(or $(SEEDS),1 2 3 4 5 6 7 8 9 10) --seconds $(or $(SECONDS),300) --jobs $(or $(JOBS),1)

soak: .venv/.test-$(PROFILE) ## Run a million random steps over every transport, with a watchdog; options: make soak ARGS="--steps 10000"
	$(BIN)/python tests/long/soak.py $(ARGS)

kills: ## Kill a server and its clients 200 times; options: make kills KILLS=1000
	FASTPS_KILLS=$(or $(KILLS),200) $(CARGO) test --locked -p fastps-cli --test rpc everything_is_killed -- --nocapture

fuzz: ## Feed random bytes to each reader of files; options: make fuzz SECONDS=60
	CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/fuzz .ci/fuzz $(or $(SECONDS),600)

clean: ## Remove everything built or installed here
	rm -rf .venv $(TARGET) $(CARGO_TARGET_DIR) dist build lab/build .pytest_cache .mypy_cache .ruff_cache
	find python lab tests -name __pycache__ -type d -prune -exec rm -rf {} +

tools:
	@.ci/tools "$(PYTHON)"

.venv/.made: | tools
	@$(PYTHON) -m venv .venv
	@touch $@

$(TARGET)/wheel/%/.built: $(SOURCES) .venv/.made | tools
	@echo "Building the wheel: some minutes the first time."
	@rm -rf $(@D) && mkdir -p $(@D)
	@MATURIN_PEP517_ARGS="--profile $* $(if $(filter dev,$*),--features failpoints) --compression-level 9" \
	  $(TIMED) "wheel" $(PIP) wheel --no-deps --wheel-dir $(@D) .
	@touch $@

$(TARGET)/wheel/lab/.built: $(LAB) .venv/.made | tools
	@rm -rf $(@D) lab/build && mkdir -p $(@D)
	@$(PIP) wheel --no-deps --wheel-dir $(@D) ./lab
	@touch $@

# Installs the wheel of profile $(2) and the lab's, even over the same version, and the packages of the extras and groups $(1).
define install-wheel
	@rm -f .venv/.demo .venv/.test-* .venv/.rest-*
	@$(BIN)/python .ci/requirements.py $(1) > .venv/packages.txt
	@$(INSTALL) --force-reinstall --no-deps "$$(ls $(TARGET)/wheel/$(2)/*.whl)" "$$(ls $(TARGET)/wheel/lab/*.whl)"
	@$(INSTALL) --requirement .venv/packages.txt
	@touch $@
endef

.venv/.demo: $(TARGET)/wheel/release/.built $(TARGET)/wheel/lab/.built
	$(call install-wheel,demo,release)

# Fetches the packages of the tests while the wheel is built.
.venv/.test-%: $(SOURCES) $(TARGET)/wheel/lab/.built .venv/.made | tools
	@echo "Fetching the packages of the tests (torch is large) while the wheel is built."
	@trap 'kill $$(jobs -p) 2>/dev/null || true' EXIT; \
	$(BIN)/python .ci/requirements.py test demo > .venv/test.txt; \
	$(TIMED) "Python packages" $(INSTALL) --no-compile --requirement .venv/test.txt & packages=$$!; \
	$(MAKE) --no-print-directory $(TARGET)/wheel/$*/.built; wait $$packages
	$(call install-wheel,test demo,$*)

.venv/.rest-%: .venv/.test-%
	@$(BIN)/python .ci/requirements.py test-rest > .venv/rest.txt
	@$(TIMED) "Python packages of make rest" $(INSTALL) --no-compile --requirement .venv/rest.txt
	@touch $@

.venv/.docs: pyproject.toml .venv/.made
	$(BIN)/python .ci/requirements.py docs > .venv/docs.txt
	$(INSTALL) --requirement .venv/docs.txt
	@touch $@
