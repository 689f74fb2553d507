# Two commands on a fresh machine with Python >= 3.10 and make:
#   make demo   set everything up and run the main job: transcribe, profile, measure, tune, confirm, report
#   make test   set everything up and run all checks and tests, notebooks included
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
NOTEBOOKS = $(sort $(wildcard notebooks/*.ipynb))
export PYTHONHASHSEED = 0

.PHONY: demo test check lab lock clean

demo: $(STAMP)
	$(BIN)/workbench demo $(ARGS)

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests
	TQDM_DISABLE=1 COLUMNS=100 $(BIN)/python -m pytest -n 2 --dist loadfile --nbval --nbval-cell-timeout 120 --nbval-current-env \
	  --nbval-sanitize-with notebooks/sanitize.cfg --timeout 600 -p no:randomly $(NOTEBOOKS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lab: $(STAMP)
	cd notebooks && $(abspath $(BIN))/jupyter lab 00_start.ipynb

lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.10 --no-annotate --no-header | \
	  grep -v '^nvidia-\|^cuda-\|^triton==' > requirements.lock

clean:
	rm -rf $(VENV) demo build *.egg-info

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13) and "Python 3.10, 3.11 or 3.12 is needed; set PYTHON=")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(STAMP)
