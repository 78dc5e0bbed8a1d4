# `make demo` and `make test` do all the set-up themselves on a fresh clone. `make help` lists all targets.
PYTHON ?= python3
VENV := .venv
MIN_VENV := .venv-min
NEMO_VENV := .venv-nemo
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
STAMP := $(VENV)/.installed
MIN_STAMP := $(MIN_VENV)/.installed
NEMO_STAMP := $(NEMO_VENV)/.installed
# What NeMo imports; the rest of what it names is for models that the tests do not train.
NEMO_NEEDS := einops huggingface_hub hydra-core nv_one_logger_core nv_one_logger_training_telemetry \
	nv_one_logger_pytorch_lightning_integration onnx pandas sentencepiece tensorboard transformers wrapt
# What pip finds by PIP_FIND_LINKS, uv finds too.
export UV_FIND_LINKS := $(if $(UV_FIND_LINKS),$(UV_FIND_LINKS),$(PIP_FIND_LINKS))

ifeq ($(UV),)
INSTALL = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
else
INSTALL = $(UV) pip install --quiet --python $(1)/bin/python
endif

.PHONY: help docs dist test-cli test-examples venv demo demo-sharded test test-all test-crash test-crash-states test-sim test-sim-defects test-corruption test-rgw test-lightning-min lint bench bench-stall bench-sharded clean test-nemo soak bench-recovery bench-scale bench-gpu bench-beside test-peers test-first-hour

help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf 'make %-20s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## the environment, by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; name one by PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call INSTALL,$(VENV)) -c constraints.txt setuptools wheel
	$(call INSTALL,$(VENV)) -c constraints.txt --no-build-isolation -e '.[test,lint,cli,examples]'
	touch $@

$(MIN_STAMP): pyproject.toml constraints-min.txt
	test -x $(MIN_VENV)/bin/python || $(PYTHON) -m venv $(MIN_VENV)
	$(call INSTALL,$(MIN_VENV)) -c constraints-min.txt setuptools wheel
	$(call INSTALL,$(MIN_VENV)) -c constraints-min.txt --no-build-isolation -e '.[test]' 'lightning==2.4.0'
	touch $@

$(NEMO_STAMP): pyproject.toml constraints-nemo.txt
	test -x $(NEMO_VENV)/bin/python || $(PYTHON) -m venv $(NEMO_VENV)
	$(call INSTALL,$(NEMO_VENV)) -c constraints-nemo.txt setuptools wheel
	$(call INSTALL,$(NEMO_VENV)) -c constraints-nemo.txt --no-build-isolation -e '.[test]' 'lightning==2.4.0' $(NEMO_NEEDS)
	$(call INSTALL,$(NEMO_VENV)) -c constraints-nemo.txt --no-deps nemo_toolkit
	touch $@

demo: venv ## a training that is killed and resumes, as a story; S3=URL for a bucket of yours
	$(BIN)/python examples/demo.py $(if $(S3),--s3 '$(S3)')

demo-sharded: venv ## the same sharded, resumed on fewer ranks: FSDP2, then FSDP1
	$(BIN)/python examples/fsdp2.py $(if $(S3),--s3 '$(S3)')
	$(BIN)/python examples/fsdp2.py --fsdp1 $(if $(S3),--s3 '$(S3)')

# Braces, for the parentheses in it need not match.
CLI_TESTS = ${shell grep -lrE --include='test_*.py' 'tiered_ckpt\(|tiered_checkpoint_io(\.| import )cli|CliRunner' tests}
EXAMPLE_TESTS = $(shell grep -lr --include='test_*.py' '"examples"' tests --exclude-dir=nemo)
# With ONCE=1, as .ci/run has it, each test is run by one target: those of test-cli and test-examples by these alone.
LEFT_OUT = $(if $(ONCE),$(addprefix --ignore=,$(sort $(CLI_TESTS) $(EXAMPLE_TESTS))))

test: venv ## each promise once, against a real S3 server: at most 5 minutes on 2 idle cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not matrix' $(LEFT_OUT) tests

# All that `make test` leaves out: the further cases, and the sweeps. With ONE_OF=8, as .ci/run has it, a sweep tries an
# eighth of its cases; SEED says which.
test-all: venv ## what test leaves out: further cases (marker matrix), test-crash, test-sim, test-crash-states, test-corruption
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix $(LEFT_OUT) tests
	$(MAKE) test-crash
	$(MAKE) test-sim
	$(MAKE) -j2 -Otarget test-crash-states test-corruption

test-first-hour: venv ## scripts as a new user writes them, their output compared; every block of README.md
	$(BIN)/python -m pytest -n 2 tests/first_hour

test-crash: venv ## SIGKILL at each effect of saves, drains and restores; last line: points=N losses=0 mixtures=0
	$(BIN)/python tests/crash/sweep.py $(if $(ONE_OF),--one-of $(ONE_OF)) $(if $(SEED),--seed $(SEED))

test-crash-states: venv ## crash states of a directory, the spill, the operation log; last line: crash_states=N losses=0 mixtures=0
	$(BIN)/python tests/crash/states.py $(if $(ONE_OF),--one-of $(ONE_OF)) $(if $(SEED),--seed $(SEED))

test-sim: venv ## simulated lives of drains, runs and replicas on several machines; last line: seeds=N steps=N violations=0
	$(BIN)/python tests/sim/run.py $(if $(ONE_OF),--one-of $(ONE_OF)) $(if $(SEED),--seed $(SEED))

test-sim-defects: venv ## defects put into the code one by one: the seed that finds each
	$(BIN)/python tests/sim/defects.py

test-corruption: venv ## one flipped byte, or one cut, at a time, in each file of each tier; last line: undetected=0
	$(BIN)/python tests/crash/corruption.py $(if $(ONE_OF),--one-of $(ONE_OF))

soak: venv ## random lives for long, and 200 saves in a row: what grows?
	TIERED_PROFILE=soak $(BIN)/python -m pytest --timeout 3600 tests/crash/test_machine.py
	$(BIN)/python tests/crash/soak.py

test-rgw: venv ## the S3 tests against a single-node Ceph RADOS Gateway (Debian packages, as root): some 6 minutes
	bash tests/support/run_rgw.sh

test-peers: venv ## every single node lost, and every pair with three copies; losses_recovered=16 durable_gets=0
	TIERED_TEST_ALL_LOSSES=1 timeout -k 10 900 $(BIN)/python -m pytest -v -n 2 tests/peers

# Of the further cases, those of strategies and ranks: what the others vary is ours, and not Lightning's.
RANKS := $(addprefix tests/lightning/test_,sharded.py ranks.py preemption.py versions.py)
test-lightning-min: $(MIN_STAMP) ## tests/lightning on Lightning 2.4.0; of the further cases, those of ranks
	$(MIN_VENV)/bin/python -m pytest -n 2 -m 'not matrix' tests/lightning
	$(MIN_VENV)/bin/python -m pytest -n 2 -m matrix $(RANKS)

# NeMo takes long to import, hence one process for all tests.
test-nemo: $(NEMO_STAMP) ## tests/nemo with nemo_toolkit 3.0.0, in an environment of its own
	$(NEMO_VENV)/bin/python -m pytest tests/nemo

test-cli: venv ## all tests that type a command of tiered-ckpt
	$(BIN)/python -m pytest -n 2 --dist worksteal $(CLI_TESTS)

# Scripts of examples/ as a user runs them; demo and demo-sharded run the two long ones, test-nemo those of NeMo.
test-examples: venv ## the scripts of examples/
	$(BIN)/python -m pytest -n 2 $(if $(ONCE),$(filter-out $(CLI_TESTS),$(EXAMPLE_TESTS)),$(EXAMPLE_TESTS))

dist: venv ## wheel and sdist from a clean clone; the wheel tried on each Python here, and at the lowest versions it declares
	$(call INSTALL,$(VENV)) -c constraints.txt --no-build-isolation -e '.[dist]'
	$(BIN)/python tests/wheel/check.py

docs: venv ## the site, in build/site; strict
	$(call INSTALL,$(VENV)) -c constraints.txt --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/_site/check.py build/site

lint: venv ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv ## ours beside others, and the goals; ARGS=--page writes docs/benchmarks.md, ARGS=--quick is short
	$(BIN)/python benchmarks/peers.py
	-$(MAKE) $(NEMO_STAMP)
	timeout -k 10 2400 $(BIN)/python benchmarks/bench.py $(ARGS)

bench-stall: venv ## how long training waits for a checkpoint: ours beside a plain copy and what others do
	$(BIN)/python benchmarks/stall.py

bench-sharded: venv ## how long training waits for an asynchronous sharded checkpoint: ours beside DCP's own
	$(BIN)/python benchmarks/sharded.py

bench-recovery: venv ## from peers beside S3; last line: recovery_ratio_to_s3=X
	timeout -k 10 300 $(BIN)/python benchmarks/recovery.py

bench-scale: venv ## what a checkpoint of 16,384 parts asks of the durable tier
	timeout -k 10 600 $(BIN)/python benchmarks/scale.py

bench-gpu: venv ## copies to and from a GPU, on a machine that has one: some ten minutes
	$(BIN)/python -W ignore benchmarks/gpu.py

bench-beside: venv ## this tree beside another commit, by turns: COMMIT=HEAD~1
	$(BIN)/python benchmarks/beside.py $(COMMIT)

clean: ## removes the environments, build and dist
	rm -rf $(VENV) $(MIN_VENV) $(NEMO_VENV) .venv-peers build dist *.egg-info
