# Each target sets up what it needs in .venv; a second call finds it there.
.PHONY: help demo test test-long bench bench-gpu lint format page page-tools notebooks docs
.DELETE_ON_ERROR:

# The first Python that is new enough; `make PYTHON=/path/to/python test` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

help:
	@echo "make demo       a story, a translation, a filled mask, a judged sentence, a cost; then the explorer"
	@echo "                (ARGS=--no-serve ends before it, ARGS='--port 9000' chooses the port)"
	@echo "make test       all tests but the long ones"
	@echo "make test-long  the long ones"
	@echo "make bench      every bar of speed on a CPU beside the peers, 20 minutes;"
	@echo "                PEERS=FOLDER names clones of those that pip has not: nanoGPT, joeynmt"
	@echo "make bench-gpu  speed, cost and memory on an NVIDIA GPU (PEERS: nanoGPT, gpt-fast)"
	@echo "make lint       style, types, imports"
	@echo "make notebooks  run the notebooks again, each in a kernel of its own, and keep what they show"
	@echo "make docs       build the documentation into site/, every link checked"
	@echo "make page       build the explorer's page into the package; needs Node"
	@echo "make format     put the code in the formatter's shape"

demo: .venv/.ready-demo
	@$(BIN)/qkv demo $(ARGS)

# torch.compile fails under run-time shape checking, so its tests run in a second call without it.
UNCHECKED := $(BIN)/pytest -q -o addopts=--import-mode=importlib

test: .venv/.ready-dev
	@if ! command -v npm >/dev/null; then echo "Node is not here: the page is not rebuilt and not tried in a browser."; \
	elif ! $(MAKE) --silent page-tools; then echo "npm could not get the page's tools: what needs them is left out."; fi
	$(BIN)/pytest -q -n auto
	$(UNCHECKED) -m "compiled and not long"

# pytest's status 5 says that no test has these marks.
test-long: .venv/.ready-dev
	$(BIN)/pytest -q -n auto -m "long and not compiled" || test $$? -eq 5
	QKV_EXAMPLES=500 $(BIN)/pytest -q -n auto tests/agreement tests/generation tests/reference
	$(UNCHECKED) -m "compiled and long" || test $$? -eq 5
	$(BIN)/python -m tests.mutation

# The page is committed, so that nobody needs Node to use it.
page: explorer/node_modules/.ready
	cd explorer && npm run --silent check && npm run --silent build

page-tools: explorer/node_modules/.ready tests/page/node_modules/.ready

# Not `npm ci`: it refuses a lock file that leaves out other systems' optional packages, as one without addresses does.
%/node_modules/.ready: %/package-lock.json
	cd $* && npm install --no-save --silent
	@touch $@

bench: .venv-bench/.ready
	.venv-bench/bin/python -m benchmarks cpu $(if $(PEERS),--peers $(PEERS)) $(ARGS)

notebooks: .venv/.ready-dev
	$(BIN)/python notebooks/run.py $(ARGS)

# Strict: a link that leads nowhere fails the build.
docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or: $(BIN)/mkdocs serve"

# Compiled graphs are kept between runs. It goes on past what fails, and says so at the end.
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
	@test -n "$(PYTHON)" || { echo "qkv needs Python 3.11 or newer, and none was found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Peers in an environment of their own. One that does not install is left out, and the table names it.
.venv-bench/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "qkv needs Python 3.11 or newer, and none was found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv-bench
	$(subst $(BIN),.venv-bench/bin,$(INSTALL)) -e '.[plot]' transformers
	for peer in ctranslate2 'gguf xllamacpp' 'sentencepiece sacrebleu' 'onnxruntime onnxscript' sentence-transformers; do \
		$(subst $(BIN),.venv-bench/bin,$(INSTALL)) $$peer || echo "left out: $$peer" >&2; done
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
