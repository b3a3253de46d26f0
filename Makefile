# make setup | test | demo | chaos | bench | lint | clean. Everything lives in .venv; nothing outside the tree is touched.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
# Python 3.11 or later; PYTHON3=python3.12 make setup chooses another.
PYTHON3 ?= python3
BUILD_INPUTS := pyproject.toml $(wildcard setup.py native/*.pyx native/*.pxd)
TESTS := $(wildcard tests/unit tests/contract tests/sim tests/e2e)
# What has a compiled twin is tested once more without it.
PURE_TESTS := $(wildcard tests/unit/test_wheel*.py tests/unit/test_ready*.py tests/unit/test_fairness*.py tests/unit/test_dispatch*.py \
  tests/unit/test_engine*.py tests/unit/test_replica.py tests/unit/test_api_jobs.py tests/unit/test_api_claims.py tests/contract/test_wheel*.py)

.PHONY: setup test demo chaos bench cron-year lint clean

setup: $(STAMP)

$(STAMP): $(BUILD_INPUTS)
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "wheelsched needs Python 3.11 or later; $(PYTHON3) is $$($(PYTHON3) --version 2>&1 || echo missing). PYTHON3=python3.12 make setup chooses another." >&2; exit 1; }
	@test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
	  echo "$(PYTHON3) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || \
	  echo "no C compiler found: the timing wheel will run in Python, slower; on Debian and Ubuntu: apt-get install gcc python3-dev, then touch pyproject.toml" >&2
	@echo "installing into $(VENV) (a few minutes the first time)"
	@# Names of package hosts are nobody's business in a build log.
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-input -e '.[test,dev,plot]' 2>&1 | sed -E '/is ignored: it is neither/d; s#(https?|file)://[^ ,]*#(index)#g' >&2
	@$(PYTHON) -m wheelsched.cli version
	@touch $@

# Cheap first: a broken unit is told within seconds. One run, so that the last line counts everything.
test: setup
ifneq ($(strip $(PURE_TESTS)),)
	@echo "== timing wheel and dispatch without the compiled parts"
	WHEELSCHED_PURE=1 $(PYTHON) -m pytest -q -x $(PURE_TESTS)
endif
	@echo "== everything"
	$(PYTHON) -m pytest --maxfail=5 --durations=5 $(TESTS)

# make demo DEMO=cluster: three nodes, and the one that leads most is killed.
demo: setup
	@$(PYTHON) -m wheelsched.cli demo $(if $(filter cluster,$(DEMO)),--cluster)

# make chaos FAULTS=100 NODES=5 SEED=7; the report goes into docs/chaos.md, too.
chaos: setup
	@$(PYTHON) -m wheelsched.testing.chaos --faults $(or $(FAULTS),100) --nodes $(or $(NODES),3) $(if $(SEED),--seed $(SEED)) --document docs/chaos.md

bench: setup
	@$(PYTHON) -m wheelsched.cli bench --size $(or $(SIZE),small) $(if $(ONLY),--only $(ONLY))

# A virtual year of schedules in a dozen zones, compared with the rules minute by minute; writes its section of docs/cron.md.
cron-year: setup
	@$(PYTHON) -m wheelsched.testing.cron_year

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

clean:
	rm -rf build dist *.egg-info native/*.c wheelsched/_native/*.so demo-output .pytest_cache .hypothesis .mypy_cache .ruff_cache $(STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
