# `make demo` and `make test` install what they need. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
CODE := src tests benchmarks examples tools
VERSION = $(shell sed -n 's/^__version__ = "\([^"]*\)".*/\1/p' src/forebay/__init__.py)
# Extras that `make wheel-check` tries; those with torch take minutes each.
EXTRAS ?= core,tokens,fast,images,remote,chat,viewer,torch,teachers,onnx,ray
# Tests wait now and then, so three processes keep two cores busy. Their files are in memory if /dev/shm is writable.
PYTEST := $(if $(shell test -w /dev/shm && echo yes),PYTEST_DEBUG_TEMPROOT=/dev/shm) $(BIN)/pytest -n 3 --dist loadgroup
# The tests that `make lowest` runs with the oldest versions that pyproject.toml allows.
LOWEST_TESTS ?= tests/store tests/format tests/golden tests/test_columns.py tests/test_recipe.py tests/building/test_build.py \
	tests/read/test_reader.py tests/cache/test_verify.py tests/building/test_repair.py
# Python images set it; without bytecode files tests take twice as long.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup demo test chromium check check-js test-slow test-long coverage campaign format bench docs record wheel wheel-check lowest release figures walk sanitize clean

help:  ## Show this list
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
	@# Azurite is the Azure server of the tests; without it they are skipped.
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

setup: $(VENV)/.dev  ## Install everything into .venv

demo: $(VENV)/.core  ## Install the core and run the demo
	$(BIN)/forebay demo

test: setup check  ## Install everything, then run check

# Tests of the viewer need Chromium; without it they are skipped.
chromium:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "==> installing chromium" && \
		apt-get update -qq && apt-get install -qq -y chromium > /dev/null; } || \
		echo "==> chromium cannot be installed here (apt-get install chromium): tests of the viewer's pages are skipped"

check: $(VENV)/.dev  ## Run ruff, mypy and the quick tests
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' -- . || { echo "conflict markers are committed (listed above)"; exit 1; }
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(PYTEST)

check-js: $(BIN)/python  ## Check the types of the viewer's JavaScript (needs npm)
	@test -x $(VENV)/typescript/node_modules/.bin/tsc || npm install --silent --no-audit --no-fund --prefix $(VENV)/typescript typescript@5
	$(VENV)/typescript/node_modules/.bin/tsc --noEmit --allowJs --checkJs --strict --target es2022 --module esnext \
		--moduleResolution bundler --lib es2022,dom,dom.iterable src/forebay/viewer/static/*.js

test-slow: setup chromium  ## Run the tests marked slow
	$(PYTEST) -m 'slow and not long'

test-long: test-slow  ## Run the slow and the long tests, with more property examples
	TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=1 $(PYTEST) -m long
	$(PYTEST) -m 'hypothesis and not long' --hypothesis-profile=long

COVERAGE := $(BIN)/coverage
coverage: $(VENV)/.dev  ## List lines that no quick or slow test runs
	$(PIP) install --quiet 'coverage>=7.13'
	@rm -rf $(VENV)/covered && mkdir $(VENV)/covered
	@printf '[run]\nsource = $(CURDIR)/src/forebay\nparallel = true\ndata_file = $(CURDIR)/$(VENV)/covered/data\npatch = _exit, fork, subprocess\n' > $(VENV)/coverage.rc
	@# Workers that a build kills at its end write no data. One test of eight threads hung under the tracer.
	-$(COVERAGE) run --rcfile=$(VENV)/coverage.rc -m pytest -n 3 --dist loadgroup -m 'not long' --deselect \
		tests/torch/test_block_mask_cache.py::test_threads_never_exceed_the_bounds_and_get_the_right_masks
	$(COVERAGE) combine --quiet --rcfile=$(VENV)/coverage.rc
	$(COVERAGE) report --rcfile=$(VENV)/coverage.rc --skip-covered --show-missing

SEED ?= 1
campaign: $(VENV)/.dev  ## Inject faults for two minutes (SEED=7 chooses others)
	$(BIN)/python -m tests.campaign --seed $(SEED) --minutes 2 --all

format: $(VENV)/.dev  ## Format the code and apply ruff fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(VENV)/.dev  ## Run the benchmarks
	$(BIN)/python -m benchmarks

docs: $(VENV)-tools/.ready  ## Build the site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)-tools/bin/mkdocs build --strict --quiet
	@echo "==> site/index.html"

wheel: $(VENV)-tools/.ready  ## Build the sdist and the wheel into dist/
	rm -rf build dist src/forebay.egg-info/SOURCES.txt
	$(VENV)-tools/bin/python -m build --outdir dist
	@# auditwheel renames the wheel to the oldest manylinux tag that it supports: PyPI rejects linux_x86_64.
	@if [ "$$(uname)" = Linux ]; then export PATH="$(abspath $(VENV)-tools/bin):$$PATH"; \
		auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	$(VENV)-tools/bin/twine check --strict dist/*

wheel-check: wheel  ## Install the wheel with each of EXTRAS in a clean environment, and try it
	$(VENV)-tools/bin/python tools/check_wheel.py dist/*.whl --extras $(EXTRAS) --constraint constraints.txt

lowest: $(VENV)-tools/.ready  ## Run the core tests with the oldest supported versions
	rm -rf $(VENV)-lowest
	$(VENV)-tools/bin/uv venv --quiet --python $(PYTHON) $(VENV)-lowest
	$(VENV)-tools/bin/uv pip install --quiet --python $(VENV)-lowest --resolution lowest-direct --editable .
	$(VENV)-tools/bin/uv pip install --quiet --python $(VENV)-lowest pytest hypothesis safetensors
	$(VENV)-lowest/bin/python -m pytest -q $(LOWEST_TESTS)

release:  ## Check everything for a release; publish nothing
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

figures:  ## Print code sizes and their limits
	$(PYTHON) tools/figures.py

sanitize: $(VENV)/.dev  ## Run the kernel tests under ASan and UBSan (needs gcc on Linux)
	@rm -rf $(VENV)/sanitized && mkdir -p $(VENV)/sanitized/forebay && cp -r src/forebay/. $(VENV)/sanitized/forebay && \
		rm -f $(VENV)/sanitized/forebay/kernels/*.so
	gcc -g -O1 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all -fPIC -shared -Wall -Wextra \
		-Wno-unused-parameter $$($(BIN)/python -c 'import sysconfig; print("-I" + sysconfig.get_paths()["include"])') \
		src/forebay/kernels/_kernels.c -o $(VENV)/sanitized/forebay/kernels/_kernels.abi3.so
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=$(VENV)/sanitized $(BIN)/python -m pytest -q tests/kernels -k 'not golden'

walk: $(VENV)/.dev  ## List the modules that a build and a read use
	$(BIN)/python tools/walk.py

record: $(VENV)/.dev  ## Record the terminal pictures in docs/pictures
	$(BIN)/python tools/record.py

clean:  ## Remove environments and build output
	rm -rf $(VENV) $(VENV)-tools $(VENV)-lowest build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf src/*.egg-info
