# make test and make demo do all the set-up themselves, in .venv; PYTHON=python3.12 make test takes another Python.
PYTHON ?= python3

.PHONY: test lint
test: .venv/dev
	.venv/bin/python -m pytest

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/app: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/app
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@
