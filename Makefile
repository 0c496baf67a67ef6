# make verify   install into .venv, fetch MovieLens-100K, prove every mode bit for bit, leave traces
# make smoke    a few hundred tests in a minute: every op, the schedule check, each mode against its reference
# make test     the test suite: of slow tests their quick counterparts, of tests with many cases some; tests of a tool
#               around the core (emulator, serving, ...) and those that take a second or more where they, or what they
#               import, differ from the upstream branch
# make test-long  the same, with those that take a second or more whatever has changed
# make test-all    every test: all mutants and injected faults, compilations, kernels on emulated GPUs
# make emulate  Triton kernels on emulated sm_80 and sm_90: their tests in three schedules, and training steps
# make lint     ruff, mypy, the workflows against GitHub's schema, the manifests against Kubernetes'
# make bench    kernels beside their peers (pytest-benchmark); JSON under out/
# make compile-matrix   every Triton kernel for every target, without a GPU, against the baseline
# make report   one HTML page of the recorded figures and of what verify, bench and simulate left under out/
# make results  docs/results.md from the figures that are committed
# make papers   what the papers report beside what stands here: every run again, then docs/papers.md
# make docs     the site under out/site, strictly: a page outside the navigation or a broken link is an error
# make wheel    a wheel in dist/ with the CPU's kernels compiled ahead, for this Python; fails if it would compile one
# make first-contact   wheel, fresh environment, README's lines, export and query, timed part by part; downloads
# make clean    remove what these made
#
# PYTHON=python3.12 chooses the interpreter of a new .venv; TRACES=folder where verify records. constraints.txt bounds
# what is installed here; the package's own metadata has no upper bounds.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TRACES ?= out/traces
BIN := .venv/bin
# Python compiles what it imports; pip would compile all of torch, which takes a minute.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# Processes of tests and their ranks share the cores: OpenMP's threads sleep while they wait, and do not spin. Many
# tests wait for a rank that stalls, so that a third process has cores to use.
export OMP_WAIT_POLICY ?= PASSIVE
# Three processes of tests and some hundred of their children import the library: compiled once, then read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: verify smoke test test-long test-all emulate lint bench compile-matrix report results papers docs wheel \
	first-contact clean

verify: .venv/installed
	$(BIN)/tritonrec fetch
	$(BIN)/tritonrec verify --data ml-100k --inject-faults --trace $(TRACES) --json out/verify.json

smoke: .venv/installed
	$(PYTEST) -m "smoke and not slow" $$(grep -rlw mark.smoke tests)

test: .venv/installed
	$(PYTEST) -m "not slow" --most-cases 2 $$(ci/changed_since.sh)

test-long: .venv/installed
	$(PYTEST) -m "not slow" --most-cases 2 --long --draw "$$(git rev-parse --short=12 HEAD)"

test-all: .venv/installed
	$(PYTEST)
	$(MAKE) emulate

emulate: .venv/installed
	$(PYTEST) --emulate sm_80 --emulate-schedules 3 -m "interpreter and not slow" tests/kernels
	$(PYTEST) --emulate sm_90 --emulate-schedules 3 -m "interpreter and not slow" tests/kernels
	$(BIN)/tritonrec verify --impl triton

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/kubernetes-validate --strict --quiet docs/examples/kubernetes.yaml

bench: .venv/installed
	mkdir -p out
	$(BIN)/tritonrec bench --json out/bench.json

compile-matrix: .venv/installed
	$(BIN)/python ci/compile/compile_matrix.py --check

report: .venv/installed
	$(BIN)/tritonrec report --html out/report.html

results: .venv/installed
	$(BIN)/tritonrec report --folder ci/baselines --markdown docs/results.md

papers: .venv/installed
	$(BIN)/tritonrec fetch
	$(BIN)/tritonrec reproduce all --folder out/papers
	$(BIN)/python ci/papers.py out/papers/papers.json

docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict --site-dir out/site

wheel: .venv/installed
	rm -rf dist
	$(BIN)/python ci/compile/ahead.py out/kernels
	PYTHON=$(BIN)/python ci/wheel.sh dist out/kernels

first-contact: wheel
	PYTHON=$(PYTHON) ci/first_contact.sh dist/*.whl

clean:
	rm -rf .venv out dist build .benchmarks .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Stamps: installed again only when the dependencies may have changed.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing tritonrec and its dependencies into .venv; PyTorch is large, the first time takes minutes."
	$(PIP) -e '.[test]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev]'
	@touch $@

.venv/installed-docs: .venv/installed
	$(PIP) -e '.[docs]'
	@touch $@
