# The front door. Every target sets up .venv on its first run: Python 3.11 - 3.13 with venv and pip is
# all that must be there. RANKS, ARGS, WORKERS and PYTHON can be given: make demo RANKS=3 ARGS=--manual
PYTHON ?= python3
RANKS ?= 2
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEMO := .venv/.installed-demo

# One core per process: the ranks are the parallelism.
export OMP_NUM_THREADS ?= 1
# Processes that tests start import what was compiled before, also where the environment says not to.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-pjrt test-newest test-device test-all lint types bench bench-quick docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(INSTALLED_DEMO) ## train an MLP on handwritten digits, split over two processes
	$(BIN)/torchrun --nproc_per_node $(RANKS) examples/mnist_mlp/train_smp.py $(ARGS)

# A worker takes tests in their order, since it keeps its ranks' processes between tests, and takes
# over from the other one when it has none left; two, because ranks that wait leave cores idle.
test: $(INSTALLED) ## run the test suite
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow and not device" $(ARGS)

# A part of the slow tests, another one every day: make test-slow PART=1. A test stays in its part.
# What takes long, and full products, are left to `test-all`.
PARTS ?= 3
PART ?= $(shell date +%-j)
test-slow: $(INSTALLED) ## run the slow tests of one part, by PART=NUMBER
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "slow and not long and not device" \
	--part=$(PART)/$(PARTS) --timeout 600 $(ARGS)

# The backend's own tests, and on it the tests of parity, replicas, messages, checkpoints, scripts and
# ordinary models; of what goes by torch's version, capture, lowering and recomputation too.
PJRT_TESTS := $(addprefix mpxla/tests/,test_parity.py test_parity_modes.py test_parity_replicas.py \
	test_late_delivery.py test_client_training.py test_parity_scripts.py test_ordinary_models.py \
	parallel/test_creation.py parallel/updates/test_zero.py checkpoint/test_save_and_resume.py \
	checkpoint/test_full.py graph stage test_changed_model.py test_recomputation.py \
	runtime/plans/test_kept_steps.py test_python_state.py test_carried.py test_recorded.py test_followed.py)
test-pjrt: $(INSTALLED) ## run the tests of the PJRT backend, and those of parity on it
	MPXLA_DEVICE=pjrt $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	-m "not slow and not device" mpxla/tests/device/pjrt $(PJRT_TESTS) $(ARGS)

test-newest: .venv-newest/.installed ## run them with the newest torch, and without torch_xla
	@$(MAKE) --no-print-directory test-pjrt BIN=.venv-newest/bin INSTALLED=.venv-newest/.installed

# Where nothing can be installed: pytest -m device mpxla/tests/device
test-device: $(INSTALLED) ## train on this machine's accelerator, if jax finds one
	$(BIN)/python -m pytest -m device -rs mpxla/tests/device $(ARGS)

test-all: $(INSTALLED) ## run the test suite with its slow tests
	@status=0; \
	$(BIN)/pytest -n $(WORKERS) -m "not ranks and not slow and not device" $(ARGS) || status=1; \
	$(BIN)/pytest -m "(ranks or slow) and not device" $(ARGS) || status=1; \
	exit $$status

lint: $(INSTALLED) ## check style and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(INSTALLED) .venv/.installed-docs ## check types, with all that is imported installed
	$(BIN)/pyright

docs: .venv/.installed-docs ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

bench: .venv/.installed-benchmarks ## measure training speed against the alternatives, as ratios
	$(BIN)/python benchmarks/suite.py $(ARGS)

bench-quick: .venv/.installed-benchmarks ## measure one small case and note it in the history
	$(BIN)/python benchmarks/quick.py --picture docs/pictures/history.svg $(ARGS)

clean: ## remove caches and builds; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find mpxla examples -type d -name __pycache__ -exec rm -rf {} +

# The stamps are written last: an interrupted installation is resumed, a changed pyproject.toml is
# installed again, and otherwise nothing is done.
.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	{ echo "mpxla needs Python 3.11 - 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	"Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv once: 4 GB of downloads, 8 GB on disk, some minutes."
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@touch $@

# Named first, since pip downloads the newest torch before it reads the extras, where an index has no
# metadata of its own.
TORCH := 'torch==2.9.*'

# What the demo imports, and no more.
$(INSTALLED_DEMO): pyproject.toml | .venv/.python
	$(BIN)/python -m pip install $(TORCH) --editable '.[demo]'
	@touch $@

$(INSTALLED): pyproject.toml | .venv/.python
	$(BIN)/python -m pip install $(TORCH) --editable '.[test,examples]'
	@touch $@ $(INSTALLED_DEMO)

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --editable '.[test-newest]'
	@touch $@

.venv/.installed-docs: pyproject.toml | .venv/.python
	$(BIN)/python -m pip install --editable '.[docs]'
	@touch $@

.venv/.installed-benchmarks: $(INSTALLED)
	$(BIN)/python -m pip install --editable '.[benchmarks]'
	@touch $@
