# Two commands do everything on a fresh Debian machine with Python and a C compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
SOURCES := $(wildcard cext/*.c cext/*.h schemas/layout.h cext/vendor/xxhash.h)

.PHONY: all demo test torture test-engines test-pythons bench bench-peers lint format sanitize soak engine clean
all: $(VENV)/.built

$(VENV)/.ready: pyproject.toml setup.py
	@command -v $(CC) >/dev/null || { echo "A C compiler is needed: apt-get install gcc libc6-dev"; exit 1; }
	@test -x $(PY) || { echo "== Python environment in $(VENV)"; $(PYTHON) -m venv $(VENV) 2>/dev/null || \
	  { rm -rf $(VENV); test "$$(id -u)" = 0 || { echo "python3-venv is missing: sudo apt-get install python3-venv python3-dev"; exit 1; }; \
	    apt-get update -qq && apt-get install -y -qq python3-venv python3-dev && $(PYTHON) -m venv $(VENV); }; }
	@$(PY) -c 'import os, sys, sysconfig; p = sysconfig.get_path("include") + "/Python.h"; sys.exit(0 if os.path.exists(p) else f"{p} is missing: apt-get install python3-dev")' || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq python3-dev; }
	@echo '#include <liburing.h>' | $(CC) -E - >/dev/null 2>&1 || test "$$(id -u)" != 0 || \
	  { apt-get update -qq && apt-get install -y -qq liburing-dev; } >/dev/null 2>&1 || true # without it: I/O in threads
	@echo "== installing hostkv and its test tools into $(VENV) (a minute)"
	@$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel
	@PYTHONWARNINGS=ignore $(BIN)/pip install -q --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.built: $(VENV)/.ready $(SOURCES)
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

# The main job on real input: first without an engine, then with vLLM on this machine's CPU.
demo: $(VENV)/.built
	@echo "== 1/3 two processes, one pool, no engine"
	@$(PY) examples/with_sidecar.py --pool-size 256MiB -- $(PY) examples/quickstart.py
	@echo "== 2/3 a real engine and a trained model (the first time: several minutes of installing, shown below)"
	@$(MAKE) --no-print-directory engine
	@echo "== 3/3 two vLLM processes, one after the other, on one sidecar"
	@$(PY) examples/with_sidecar.py --pool-size 1GiB -- .venvs/vllm/bin/python examples/vllm_two_engines.py

engine: $(VENV)/.built
	@bash tests/engines/install_vllm.sh
	@.venvs/vllm/bin/python tests/engines/make_model.py

# Most tests wait for processes that die or disks that answer late, so two of them run at a time.
test: $(VENV)/.built
	@$(PY) -m pytest tests --ignore=tests/engines -n 2 --dist loadfile

# The simulation, and a minute of each torture: what `make test` does a few seconds of, and `make soak` an hour.
torture: $(VENV)/.built
	@$(PY) -m tests.sim --seeds 3000
	@$(PY) -m tests.crash.torture --minutes 1
	@$(PY) -m tests.crash.torture --minutes 1 --sidecar-kills --verify
	@$(PY) -m tests.crash.torture --minutes 1 --tier
	@$(PY) -m tests.crash.restart --kills 50
	@$(PY) -m tests.crash.killed --trials 200 --outside 24

# First the engines' own parts around ours, in one process: vLLM's scheduler around a model that checks every byte, and SGLang's host pools;
# then whole engines, with models.
INSIDE := tests/engines/inside
test-engines: engine
	@bash tests/engines/install_sglang.sh
	@.venvs/vllm/bin/python -m pytest $(INSIDE) --confcutdir=$(INSIDE) -W ignore::DeprecationWarning
	@.venvs/sglang/bin/python -m pytest $(INSIDE)_sglang --confcutdir=$(INSIDE)_sglang
	@$(PY) -m pytest tests/engines --ignore-glob='$(INSIDE)*' -s

# The unit and contract tests on every Python that is here, each against a wheel built for it.
test-pythons: $(VENV)/.ready
	@bash tests/pythons.sh

bench: $(VENV)/.built
	@$(BIN)/hostkv bench

# HostKV beside LMCache, Mooncake and vLLM's own offloading, which it installs (5 GB in all); an hour the first time.
bench-peers: $(VENV)/.built
	@$(PY) -m tests.bench.peers

$(VENV)/.lint: $(VENV)/.ready Makefile
	@$(BIN)/pip install -q ruff==0.17.6 mypy==2.4.1 clang-format==21.1.2 types-PyYAML msgpack-types types-setuptools
	@touch $@

lint: $(VENV)/.built $(VENV)/.lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@mkdir -p .cache/types/hostkv && for package in schemas cext sidecar connector; do ln -sfn ../../../$$package .cache/types/hostkv/$$package; done
	@$(BIN)/mypy -p hostkv.schemas -p hostkv.cext -p hostkv.sidecar -p hostkv.connector
	@$(BIN)/clang-format --dry-run -Werror cext/*.c cext/*.h schemas/*.h

format: $(VENV)/.lint
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(BIN)/clang-format -i cext/*.c cext/*.h schemas/*.h

# The C extension under AddressSanitizer and UBSan, in an environment of its own.
sanitize: $(VENV)/.ready
	@PYTHON=$(PYTHON) bash tests/sanitize.sh

soak: $(VENV)/.built
	@$(PY) -m pytest tests/property --hypothesis-profile=soak -s
	@$(PY) -m tests.sim --seeds 100000
	@$(PY) -m tests.sim.mutate --seeds 1000
	@$(PY) -m tests.crash.torture --minutes 10
	@$(PY) -m tests.crash.torture --minutes 10 --sidecar-kills --verify
	@$(PY) -m tests.crash.torture --minutes 10 --tier --pool 1GiB --working-set 8GiB
	@$(PY) -m tests.crash.torture --minutes 10 --tier --verify
	@$(PY) -m tests.bench.recovery
	@$(PY) -m tests.crash.killed --all
	@$(PY) -m tests.crash.restart --kills 200
	@$(PY) -m tests.crash.restart --pool 4GiB
	@$(BIN)/hostkv bench

clean:
	rm -rf build dist *.egg-info cext/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache $(VENV)
