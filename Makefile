# Each target does everything from a fresh clone: environment, pinned install, then the job.
# `make bench PYTHON=python3` uses a Python that already has torch, and installs nothing.
SYSTEM_PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

ifdef PYTHON
READY :=
RUN := PYTHONPATH=src $(PYTHON)
else
READY := $(STAMP)
RUN := $(VENV)/bin/python
endif

.PHONY: help install demo examples docs test test-long check bench clean
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(SYSTEM_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

install: $(READY)  ## create .venv and install the pinned dependencies

demo: $(READY)  ## compare FP32 and mixed precision on real handwritten digits
	$(RUN) -m narrowcast compare examples/digits.py

examples: $(READY)  ## run every example at full size for this machine; pictures go to docs/gallery/
	$(RUN) docs/make_gallery.py

docs: $(READY)  ## build the documentation, strictly, into build/docs/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html; to search it: python -m http.server -d build/docs"

test: $(READY)  ## run every test
	$(RUN) -m pytest

test-long: $(READY)  ## 12,000 random trainings, 400 kills while saving, all commands of the documents; minutes
	HYPOTHESIS_PROFILE=long $(RUN) -m pytest tests/gradients/test_against_torch.py \
		tests/training/test_checkpoint_kills.py tests/test_documents.py

check: $(READY)  ## lint, formatting, types and the order of the rooms
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_architecture.py

bench: $(READY)  ## measure, both sides in one run; ratios go to benchmarks/results/
	$(RUN) benchmarks/run.py

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
