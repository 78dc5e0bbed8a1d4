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

.PHONY: help venv demo demo-sharded test test-all dist docs lint size bench

help: ## this list
	@sed -nE 's/^([a-z%-]+):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf 'make %-20s %s\n' "$$name" "$$text"; done

venv: $(if $(NEW),constraints) $(STAMP) ## the environment, by constraints.txt; NEW=1 first writes constraints*.txt anew, of the newest versions

.PHONY: constraints
constraints:
	.ci/constraints $(PYTHON) $(NEMO_NEEDS)

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

# Three at a time on two cores: a third of a test is waiting.
test: venv ## each promise once, against a real S3 server; AREA=drain for one folder of tests
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not matrix' $(addprefix tests/,$(or $(AREA),.))

# With ONE_OF=8, as .ci/run has it, a sweep tries an eighth of its cases; SEED says which.
test-all: venv ## all else: further cases (marker matrix), and the sweeps crash, sim, crash-states, corruption
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix tests
	$(MAKE) test-crash
	$(MAKE) test-sim
	$(MAKE) -j2 -Otarget test-crash-states test-corruption

# One proof each, by name. Its last line holds the figures: losses=0, mixtures=0, violations=0, undetected=0.
SHARE := $(if $(ONE_OF),--one-of $(ONE_OF)) $(if $(SEED),--seed $(SEED))
PROOFS := crash crash-states sim sim-defects corruption soak peers rgw lightning-min nemo
crash = $(BIN)/python tests/crash/sweep.py $(SHARE)
crash-states = $(BIN)/python tests/crash/states.py $(SHARE)
sim = $(BIN)/python tests/sim/run.py $(SHARE)
sim-defects = $(BIN)/python tests/sim/defects.py
corruption = $(BIN)/python tests/crash/corruption.py $(if $(ONE_OF),--one-of $(ONE_OF))
soak = $(BIN)/python tests/crash/soak.py
peers = TIERED_TEST_ALL_LOSSES=1 timeout -k 10 900 $(BIN)/python -m pytest -v -n 2 tests/peers
rgw = bash tests/support/run_rgw.sh
# Of the further cases, those of strategies and ranks: the others vary our code, not Lightning's.
RANKS := $(addprefix tests/lightning/test_,sharded.py ranks.py preemption.py versions.py)
lightning-min = $(MIN_VENV)/bin/python -m pytest -n 2 -m 'not matrix' tests/lightning && \
	$(MIN_VENV)/bin/python -m pytest -n 2 -m matrix $(RANKS)
# NeMo takes long to import, hence one process for all tests.
nemo = $(NEMO_VENV)/bin/python -m pytest tests/nemo

test-%: venv ## one proof whole: crash, crash-states, sim, sim-defects, corruption, soak, peers, rgw, lightning-min, nemo
	@$(if $(filter $*,$(PROOFS)),:,echo 'make test-$*: no such proof; there are: $(PROOFS)' >&2; exit 2)
	$(if $(filter lightning-min,$*),$(MAKE) $(MIN_STAMP))
	$(if $(filter nemo,$*),$(MAKE) $(NEMO_STAMP))
	$($*)

dist: venv ## wheel and sdist from a clean clone; the wheel tried on each Python here, and at the lowest versions it declares
	$(call INSTALL,$(VENV)) -c constraints.txt --no-build-isolation -e '.[dist]'
	$(BIN)/python tests/wheel/check.py

docs: venv ## the site, in build/site; strict
	$(call INSTALL,$(VENV)) -c constraints.txt --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/_site/check.py build/site

lint: venv ## ruff, mypy --strict, import-linter, and the budgets of size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/support/size.py --check

size: venv ## lines, words, names and keys beside their budgets; ARGS=--lower lowers these to today's figures
	$(BIN)/python tests/support/size.py $(ARGS)

bench: venv ## ours beside others, and the goals; ARGS=--page writes docs/benchmarks.md, ARGS=--quick is short
	$(BIN)/python benchmarks/peers.py
	-$(MAKE) $(NEMO_STAMP)
	timeout -k 10 2400 $(BIN)/python benchmarks/bench.py $(ARGS)
