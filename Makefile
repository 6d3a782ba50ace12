# Two commands: `make serve` and `make test`. Everything lives in .venv; a second call is quick.
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
SANITIZED := build/sanitized
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRA := import sys, tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]], sep='\n')

.PHONY: serve test test-slow test-sanitized clients check format bench clean

serve: $(VENV)/.installed
	$(BIN)/pagemill serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.installed-slow clients
	$(BIN)/python -m pytest -m slow $(ARGS)

# The kernels' tests under AddressSanitizer and UBSan, whose first report ends the run; what ranks share under TSan.
test-sanitized: $(SANITIZED)/.installed $(SANITIZED)/races
	$$(setarch -R true && echo setarch -R) $(SANITIZED)/races
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(SANITIZED)/venv/bin/python -m pytest --capture=sys tests/kernels tests/sampling/test_native.py $(ARGS)

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

# The instrumented package, in an environment that borrows the rest of .venv; a borrowed folder's .pth files, and with
# them the editable package, stay out. A package without kernels, which installs where they do not build, is refused.
$(SANITIZED)/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv --without-pip --clear $(SANITIZED)/venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'))" \
	  > $$($(SANITIZED)/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")/borrowed.pth
	$(BIN)/python -m pip --python $(SANITIZED)/venv install --quiet --disable-pip-version-check --no-deps \
	  --config-settings=build-dir=$(SANITIZED)/cmake --config-settings=install.strip=false \
	  --config-settings=cmake.define.PAGEMILL_SANITIZE=address,undefined .
	ls $(SANITIZED)/venv/lib/python*/site-packages/pagemill/_native.*so > /dev/null
	touch $@

# One copy of the kernels with the pool, without Python. ThreadSanitizer wants addresses that are not randomised.
$(SANITIZED)/races: tests/kernels/races.cpp $(NATIVE)
	mkdir -p $(SANITIZED)
	$(CXX) -std=c++20 -O1 -g1 -ffp-contract=off -fsanitize=thread -pthread -Icsrc -DPM_ISA=portable -DPM_ISA_IS_PORTABLE=1 \
	  $< $(filter-out %/bindings_core.cpp %/ceilings.cpp %/ceilings.isa.cpp,$(wildcard csrc/core/*.cpp)) \
	  $(filter-out %/bindings_ops.cpp,$(wildcard csrc/ops/*.cpp)) \
	  $(filter-out %/bindings_linear.cpp,$(wildcard csrc/linear/*.cpp)) \
	  $(filter-out %/bindings_program.cpp,$(wildcard csrc/program/*.cpp)) \
	  $(filter-out %/bindings_sampling.cpp,$(wildcard csrc/sampling/*.cpp)) -o $@

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
