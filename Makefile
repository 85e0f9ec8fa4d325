# `make demo` and `make test` do all their own set-up. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
CODE := src tests benchmarks examples tools
VERSION = $(shell sed -n 's/^__version__ = "\([^"]*\)".*/\1/p' src/forebay/__init__.py)
# What `make wheel-check` installs the wheel with; the ones with torch take minutes each.
EXTRAS ?= core,tokens,fast,images,pictures,remote,chat,viewer,torch,teachers,onnx,ray
# Tests wait now and then: three processes keep two cores busy. Their files are in memory where there is room.
PYTEST := $(if $(shell test -w /dev/shm && echo yes),PYTEST_DEBUG_TEMPROOT=/dev/shm) $(BIN)/pytest -n 3 --dist loadgroup
# The tests that `make lowest` runs with the oldest versions that pyproject.toml allows.
LOWEST_TESTS ?= tests/store tests/format tests/golden tests/test_columns.py tests/test_recipe.py tests/building/test_build.py \
	tests/read/test_reader.py tests/cache/test_verify.py tests/building/test_repair.py
# Images of Python set it; then every process compiles all that it imports, and tests take twice as long.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup demo test chromium check check-js test-slow test-long coverage campaign format bench docs record wheel wheel-check lowest release figures walk sanitize clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("forebay needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt src/forebay/kernels/_kernels.c src/forebay/images/_resize.c | $(BIN)/python
	@echo "==> installing forebay and its dependencies into $(VENV)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[tokens]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt src/forebay/kernels/_kernels.c src/forebay/images/_resize.c | $(BIN)/python
	@echo "==> installing forebay, torch and the development tools into $(VENV) (a few minutes the first time)"
	@# Azurite is the Azure service of the tests, which skip what needs it where it is missing.
	@if command -v npm >/dev/null; then mkdir -p $(VENV)/azurite && \
		npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite || true; fi & \
		$(BIN)/python tools/install.py --constraint constraints.txt --editable '.[dev]'; installed=$$?; wait; exit $$installed
	@touch $@ $(VENV)/.core

# The site and the release have a separate environment: `make test` needs neither, and installs neither.
$(VENV)-tools/.ready: pyproject.toml constraints.txt
	@echo "==> installing the tools of 'make docs' and 'make release' into $(VENV)-tools"
	$(PYTHON) -m venv $(VENV)-tools
	$(VENV)-tools/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[docs,release]' uv
	@touch $@

setup: $(VENV)/.dev  ## a .venv with everything that test, bench and demo need

demo: $(VENV)/.core  ## the whole thing on data every machine has
	$(BIN)/forebay demo

test: setup check  ## set-up, then check

# The pages of `forebay view` are tested in a browser. Where it cannot be installed, their tests are skipped and say so.
chromium:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "==> installing chromium" && \
		apt-get update -qq && apt-get install -qq -y chromium > /dev/null; } || \
		echo "==> chromium cannot be installed here (apt-get install chromium): tests of the viewer's pages are skipped"

check: $(VENV)/.dev  ## ruff format, ruff, mypy --strict, pytest
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' -- . || { echo "conflict markers are committed (listed above)"; exit 1; }
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(PYTEST)

check-js: $(BIN)/python  ## the types of the viewer's modules, which stand in JSDoc; needs npm
	@test -x $(VENV)/typescript/node_modules/.bin/tsc || npm install --silent --no-audit --no-fund --prefix $(VENV)/typescript typescript@5
	$(VENV)/typescript/node_modules/.bin/tsc --noEmit --allowJs --checkJs --strict --target es2022 --module esnext \
		--moduleResolution bundler --lib es2022,dom,dom.iterable src/forebay/viewer/static/*.js

test-slow: setup chromium  ## the tests that `make test` leaves out: marked slow
	$(PYTEST) -m 'slow and not long'

test-long: test-slow  ## test-slow, the campaigns that take minutes, and property tests with twenty times as many examples
	TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=1 $(PYTEST) -m long
	$(PYTEST) -m 'hypothesis and not long' --hypothesis-profile=long

COVERAGE := $(BIN)/coverage
coverage: $(VENV)/.dev  ## the lines of src that no test of `make test` and `make test-slow` runs, processes that tests start included
	$(PIP) install --quiet 'coverage>=7.13'
	@rm -rf $(VENV)/covered && mkdir $(VENV)/covered
	@printf '[run]\nsource = $(CURDIR)/src/forebay\nparallel = true\ndata_file = $(CURDIR)/$(VENV)/covered/data\npatch = _exit, fork, subprocess\n' > $(VENV)/coverage.rc
	@# Workers that a build kills at its end write no data. One test of eight threads hung under the tracer.
	-$(COVERAGE) run --rcfile=$(VENV)/coverage.rc -m pytest -n 3 --dist loadgroup -m 'not long' --deselect \
		tests/torch/test_block_mask_cache.py::test_threads_never_exceed_the_bounds_and_get_the_right_masks
	$(COVERAGE) combine --quiet --rcfile=$(VENV)/coverage.rc
	$(COVERAGE) report --rcfile=$(VENV)/coverage.rc --skip-covered --show-missing

SEED ?= 1
campaign: $(VENV)/.dev  ## two minutes of faults; SEED=7 chooses others
	$(BIN)/python -m tests.campaign --seed $(SEED) --minutes 2 --all

format: $(VENV)/.dev  ## ruff format, and what ruff can fix
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(VENV)/.dev  ## measure against named peers; prints ratios
	$(BIN)/python -m benchmarks

docs: $(VENV)-tools/.ready  ## the site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)-tools/bin/mkdocs build --strict --quiet
	@echo "==> site/index.html"

wheel: $(VENV)-tools/.ready  ## sdist and wheel, into dist/
	rm -rf build dist src/forebay.egg-info/SOURCES.txt
	$(VENV)-tools/bin/python -m build --outdir dist
	@# auditwheel finds the oldest C library that the wheel runs with, and names the wheel by it: PyPI refuses linux_x86_64.
	@if [ "$$(uname)" = Linux ]; then export PATH="$(CURDIR)/$(VENV)-tools/bin:$$PATH"; \
		auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	$(VENV)-tools/bin/twine check --strict dist/*

wheel-check: wheel  ## install the wheel in clean environments, with EXTRAS one by one, and try it
	$(VENV)-tools/bin/python tools/check_wheel.py dist/*.whl --extras $(EXTRAS) --constraint constraints.txt

lowest: $(VENV)-tools/.ready  ## the core's tests with the oldest versions that are allowed
	rm -rf $(VENV)-lowest
	$(VENV)-tools/bin/uv venv --quiet --python $(PYTHON) $(VENV)-lowest
	$(VENV)-tools/bin/uv pip install --quiet --python $(VENV)-lowest --resolution lowest-direct --editable .
	$(VENV)-tools/bin/uv pip install --quiet --python $(VENV)-lowest pytest hypothesis safetensors
	$(VENV)-lowest/bin/python -m pytest -q $(LOWEST_TESTS)

release:  ## a dry run: every check that a release needs, then what to type
	@test -z "$$(git status --porcelain)" || { echo "release: the tree has changes that are not committed (git status)"; exit 1; }
	@grep -Eq '^## $(VERSION) — [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md || \
		{ echo "release: CHANGELOG.md needs the heading '## $(VERSION) — YYYY-MM-DD' ('unreleased' is replaced by the date)"; exit 1; }
	@! git rev-parse -q --verify 'refs/tags/v$(VERSION)' > /dev/null || \
		{ echo "release: the tag v$(VERSION) exists; raise __version__ in src/forebay/__init__.py"; exit 1; }
	$(MAKE) wheel-check docs
	@echo
	@echo "forebay $(VERSION) is ready. Nothing was published. Type:"
	@echo "  git tag -a v$(VERSION) -m 'forebay $(VERSION)' && git push origin v$(VERSION)"
	@echo "  $(VENV)-tools/bin/twine upload dist/*    # and the wheels that wheel.yml builds for macOS and ARM (dist-macos, dist-arm)"

figures:  ## files, lines, repeated names, functions per file
	$(PYTHON) tools/figures.py

sanitize: $(VENV)/.dev  ## the tests of the compiled loops under AddressSanitizer and UBSan; needs gcc on Linux
	@rm -rf $(VENV)/sanitized && mkdir -p $(VENV)/sanitized/forebay && cp -r src/forebay/. $(VENV)/sanitized/forebay && \
		rm -f $(VENV)/sanitized/forebay/kernels/*.so
	gcc -g -O1 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all -fPIC -shared -Wall -Wextra \
		-Wno-unused-parameter $$($(BIN)/python -c 'import sysconfig; print("-I" + sysconfig.get_paths()["include"])') \
		src/forebay/kernels/_kernels.c -o $(VENV)/sanitized/forebay/kernels/_kernels.abi3.so
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=$(VENV)/sanitized $(BIN)/python -m pytest -q tests/kernels -k 'not golden'

walk: $(VENV)/.dev  ## the modules that a build and a read run through
	$(BIN)/python tools/walk.py

record: $(VENV)/.dev  ## the pictures of terminals in docs/pictures, from real runs
	$(BIN)/python tools/record.py

clean:  ## remove the environments and what tools left behind
	rm -rf $(VENV) $(VENV)-tools $(VENV)-lowest build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf src/*.egg-info
