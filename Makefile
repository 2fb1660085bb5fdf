# Each target does everything from a fresh clone: environment, pinned install, then the job.
# `make bench PYTHON=python3` uses a Python that already has torch, and installs nothing; so does `make gpu`.
# `make test SYSTEM_PYTHON=python3.12 TORCH=2.11.0` makes an environment of its own, with that torch.
SYSTEM_PYTHON ?= python3
VENV := .venv$(if $(TORCH),-$(TORCH)-$(notdir $(SYSTEM_PYTHON)))
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
STAMP := $(VENV)/.installed
# The demo needs no tools of developers and no hosts: a newcomer waits for its install.
DEMO_STAMP := $(VENV)/.installed-examples

ifdef PYTHON
READY :=
DEMO_READY :=
RUN := PYTHONPATH=src $(PYTHON)
else
READY := $(STAMP)
DEMO_READY := $(DEMO_STAMP)
RUN := $(VENV)/bin/python
endif
PYTEST := $(RUN) -m pytest $(if $(CI),--ci)

.PHONY: help install demo examples docs test test-long breakages check bench verdicts gpu gpu-wheels clean
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

$(STAMP): EXTRAS := all,dev
$(DEMO_STAMP): EXTRAS := examples
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt
	$(SYSTEM_PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@ $(DEMO_STAMP)

install: $(READY)  ## create .venv and install the pinned dependencies

demo: $(DEMO_READY)  ## compare FP32 and mixed precision on real handwritten digits
	$(RUN) -m narrowcast compare examples/digits.py

examples: $(READY)  ## run every example at full size for this machine; pictures go to docs/gallery/
	$(RUN) docs/make_gallery.py

docs: $(READY)  ## build the documentation, strictly, into build/docs/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html; to search it: python -m http.server -d build/docs"

test: $(READY)  ## run the tests, on all cores; minutes
	$(PYTEST) -n auto -m "not long"

AVX2_ALONE := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 PYTHONPATH=tests/avx2_cpu:$$PYTHONPATH

test-long: $(READY)  ## exhaustive products, long random runs, kills, and the tests of an older CPU; half an hour
	$(PYTEST) -n auto -m long
	$(AVX2_ALONE) $(PYTEST) -n auto -m "cpu_kind and not long"

breakages: $(READY)  ## break the package in each way of tests/breakages.toml; the tests must notice; an hour
	$(RUN) tests/breakages.py

check: $(READY)  ## lint, formatting, types, and the layout of the packages
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_architecture.py

bench: $(READY)  ## measure, both sides in one run; ratios go to benchmarks/results/
	$(RUN) benchmarks/run.py

verdicts: $(READY)  ## compare programs whose answer is known; narrowcast compare must not be wrong; ten minutes
	$(RUN) benchmarks/verdicts/run.py

RESULTS ?= build/gpu

gpu: $(READY)  ## everything that needs a GPU, in 28 minutes at most; RESULTS=DIR, PIECE=name (docs/gpu.md)
	$(RUN) benchmarks/gpu "$(RESULTS)" $(if $(PIECE),--piece $(PIECE))

gpu-wheels:  ## fetch what a machine with a GPU and torch may lack, for Python 3.12, into build/gpu-wheels
	$(SYSTEM_PYTHON) benchmarks/gpu/wheels.py

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
