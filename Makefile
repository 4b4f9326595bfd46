# make demo and make test set up everything they need in .venv; a second run installs nothing.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint sanitize smoke install clean

demo: install
	$(RUN) -m tasks.classification.demo

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# The C++ kernels under an address sanitizer, also part of the tests.
sanitize: install
	CI_NEEDS_KERNELS=1 $(RUN) -m pytest tests/hf_sparseprior/kernels/test_sanitizer.py

# Training runs of minutes, not part of the tests.
smoke: install
	$(RUN) -m tasks.classification.train --config configs/classification/smoke.yaml

install: $(VENV)/installed

# torch first: asked for by another package it could come in another build. Everything in the versions tested.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; give another with PYTHON=" % sys.version_info[:2])'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[analysis,classification,dev]'
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-deps imagecorruptions
	$(RUN) -m hf_sparseprior doctor
	touch $@

clean:
	rm -rf $(VENV) outputs
