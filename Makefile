# Each target installs what it needs in .venv; later calls reuse it.
.PHONY: help demo test test-long test-gpu bench bench-gpu lint format page page-tools notebooks docs
.DELETE_ON_ERROR:

# The first Python that is new enough; `make PYTHON=/path/to/python test` selects another one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

help:
	@echo "make demo       print a story, a translation, a filled mask, a classified sentence and a cost, then serve the explorer"
	@echo "                (ARGS=--no-serve does not start the server, ARGS='--port 9000' sets the port)"
	@echo "make test       run all tests except the long ones"
	@echo "make test-long  run the long tests"
	@echo "make test-gpu   run the tests of all kernels and backends on an NVIDIA GPU (ARGS are passed on to pytest)"
	@echo "make bench      compare CPU speed with other libraries (20 minutes);"
	@echo "                PEERS=FOLDER contains clones of peers that are not on PyPI: nanoGPT, joeynmt"
	@echo "make bench-gpu  measure speed, cost and memory on an NVIDIA GPU (PEERS: nanoGPT, gpt-fast)"
	@echo "make lint       check style, types and imports"
	@echo "make notebooks  run the notebooks and store their output"
	@echo "make docs       build the documentation in site/ and check all links"
	@echo "make page       build the explorer page into the package (needs Node)"
	@echo "make format     format the code"

demo: .venv/.ready-demo
	@$(BIN)/qkv demo $(ARGS)

# torch.compile fails under run-time shape checking, so its tests run in a second call without the checks.
UNCHECKED := $(BIN)/pytest -q -o addopts=--import-mode=importlib

test: .venv/.ready-dev
	@if ! command -v npm >/dev/null; then echo "Node is not installed: the tests of the explorer page are skipped."; \
	elif ! $(MAKE) --silent page-tools; then echo "npm could not install the page's tools: the tests that need them are skipped."; fi
	$(BIN)/pytest -q -n auto
	$(UNCHECKED) -m "compiled and not long"

# pytest exits with status 5 if no test has these marks.
test-long: .venv/.ready-dev
	$(BIN)/pytest -q -n auto -m "long and not compiled" || test $$? -eq 5
	QKV_EXAMPLES=500 $(BIN)/pytest -q -n auto tests/agreement tests/generation tests/reference
	$(UNCHECKED) -m "compiled and long" || test $$? -eq 5
	$(BIN)/python -m tests.mutation

# The selected Python runs the tests itself if it has everything they need, as on a machine without network access.
# Compiled code warns about settings of the GPU, so warnings are not errors.
GPU_TESTS := tests/accel tests/agreement/test_backends.py
test-gpu:
	@python=$(PYTHON); if ! $$python -c 'import beartype, hypothesis, jaxtyping, pydantic, tokenizers, tomli_w, torch, triton, xdist' 2>/dev/null; \
	then $(MAKE) --silent .venv/.ready-dev && python=$(BIN)/python || exit 1; fi; \
	$$python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu requires an NVIDIA GPU, but torch.cuda.is_available() is False")' \
	&& PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $$python -m pytest -q -o addopts=--import-mode=importlib -W default -rs -n auto --maxprocesses 12 $(GPU_TESTS) $(ARGS)

# The built page is committed, so that using it does not require Node.
page: explorer/node_modules/.ready
	cd explorer && npm run --silent check && npm run --silent build

page-tools: explorer/node_modules/.ready tests/page/node_modules/.ready

# Not `npm ci`: it rejects a lock file without the optional packages of other platforms, which ours omits.
%/node_modules/.ready: %/package-lock.json
	cd $* && npm install --no-save --silent
	@touch $@

bench: .venv-bench/.ready
	.venv-bench/bin/python -m benchmarks cpu $(if $(PEERS),--peers $(PEERS)) $(ARGS)

notebooks: .venv/.ready-dev
	$(BIN)/python notebooks/run.py $(ARGS)

# Strict mode: a broken link fails the build.
docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html or run: $(BIN)/mkdocs serve"

# A failing benchmark does not stop the others; all failures are reported at the end.
bench-gpu: .venv/.ready-dev
	failed=; for name in train-gpu encode-gpu decode-gpu cost memory recurrence growth; do \
		$(BIN)/python -m benchmarks $$name --device cuda $(if $(PEERS),--peers $(PEERS)) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

lint: .venv/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: .venv/.ready-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "qkv needs Python 3.11 or newer, but none was found. Specify one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Peers are installed in a separate environment. A peer that cannot be installed is skipped and named in the table.
.venv-bench/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "qkv needs Python 3.11 or newer, but none was found. Specify one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv-bench
	$(subst $(BIN),.venv-bench/bin,$(INSTALL)) -e '.[plot]' transformers
	for peer in ctranslate2 'gguf xllamacpp' 'sentencepiece sacrebleu' 'onnxruntime onnxscript' sentence-transformers; do \
		$(subst $(BIN),.venv-bench/bin,$(INSTALL)) $$peer || echo "skipped: $$peer" >&2; done
	@touch $@

.venv/.ready-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[plot,serve,eval]'
	@touch $@

.venv/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ .venv/.ready-demo .venv/.ready-docs

.venv/.ready-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $@
