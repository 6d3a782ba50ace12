# Two commands: `make serve` and `make test`. Everything lives in .venv; a second call is quick.
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRA := import sys, tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]], sep='\n')

.PHONY: serve test test-slow clients check format bench native sanitize clean

serve: $(VENV)/.installed
	$(BIN)/pagemill serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.installed-slow clients
	$(BIN)/python -m pytest -m slow $(ARGS)

# The same checks for people and for CI: format, lint, types.
check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The machine's ceilings and the kernels under them, W1 to W5, and the curves: about ten minutes. Nothing else should run.
# ARGS="--peers llama.cpp,vllm" runs other engines on the same work.
bench: $(VENV)/.installed-test
	$(BIN)/python -c "$(EXTRA)" bench > $(VENV)/bench.txt
	$(PIP_INSTALL) -r $(VENV)/bench.txt
	$(BIN)/python benchmarks/kernels.py --rows 1,16,64 --budget 0.1 --json build/bench/kernels.json
	$(BIN)/python benchmarks/run.py --options "" --options "--quantization int8" --options "--dtype bfloat16" --out build/bench/run.json $(ARGS)
	$(BIN)/python benchmarks/curves.py --out build/bench/curves

# The editable install builds csrc/; without a C++ compiler it installs the pure-Python package, which says so.
$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	touch $@

# What tests need beside the package, without building the package again.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -c "$(EXTRA)" test > $(VENV)/test.txt
	$(PIP_INSTALL) -r $(VENV)/test.txt
	touch $@

# What slow tests need beside that: the driver of a browser that the machine has.
$(VENV)/.installed-slow: $(VENV)/.installed-test
	$(BIN)/python -c "$(EXTRA)" browser > $(VENV)/browser.txt
	$(PIP_INSTALL) -r $(VENV)/browser.txt
	touch $@

# The programs that talk to the server in slow tests. Without Node.js its client is left out, and its test is skipped.
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: pyproject.toml tests/clients/constraints.txt tests/clients/package.json
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -c "$(EXTRA)" clients > $(CLIENTS)/clients.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt -r $(CLIENTS)/clients.txt
	if command -v npm > /dev/null; then cp tests/clients/package.json $(CLIENTS) && npm install --silent --no-package-lock --prefix $(CLIENTS); fi
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
