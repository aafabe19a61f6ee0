# `make demo` and `make test` need Python 3.11+ with venv, make and git; the rest is installed into .venv.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -q --progress -o console_output_style=classic
WORKERS ?= 2
# Threads inside a worker or a kernel's simulation would compete with the workers themselves.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg

.PHONY: help venv demo test test-long test-gpu test-pins test-engines test-engines-long bench lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: ## set up .venv (done by the others when needed)
	@sh scripts/bootstrap.sh

demo: venv ## run compiled Blackwell kernels on layers of gpt-oss-20b in the simulator (half a minute)
	@$(PY) scripts/demo.py

# Rewriting asserts, for messages with values, takes each worker 8 s. So only what failed is run again with it. Bytecode
# is kept, whatever the environment says, for the processes that tests start.
test: export PYTHONDONTWRITEBYTECODE :=
test: venv ## all tests that need no GPU and no patience (7 to 10 minutes on 2 cores the first time, less later)
	@$(PYTEST) -n $(WORKERS) --dist worksteal --assert=plain || \
		{ $(PYTEST) --last-failed --last-failed-no-failures none; exit 1; }

test-long: venv ## the tests marked long (about 2 hours on 2 cores); PART=2/4: a quarter of them
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m "long and not gpu" $(if $(PART),--part $(PART))

test-gpu: venv ## tests on the GPU of this machine (10 minutes on an H100 with 16 cores, the first time)
	@$(PYTEST) -n auto --maxprocesses 14 --dist worksteal -m gpu tests/gpu

# Every family of kernels, the compiler's and the simulator's edges. Engines pin DSL 4.8.0 and tvm-ffi 0.1.11.
PIN_TESTS := tests/common tests/softmax tests/sim/test_host.py tests/sim/test_arguments.py tests/sim/test_pointer_arguments.py \
	$(addprefix tests/moe/test_,grouped_gemm_sim.py quantize_rows.py unpermute.py) \
	$(addprefix tests/fmha/test_,sm90_sim.py kernel_sim.py combine.py)

test-pins: ## part of the tests with the oldest compiler allowed, in .venv-pins (about 8 minutes on 2 cores, plus its set-up)
	@sh scripts/bootstrap.sh --pins
	@.venv-pins/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(PIN_TESTS)

# Each in a process of its own: SGLang loads plug-ins once a process, and images want much memory.
ALONE := tests/engines/test_sglang_sparse.py tests/engines/test_sglang_images.py

test-engines: ## vLLM, SGLang and transformers with our attention, in .venv-engines (4.2 GB, 2 minutes; then about 20 on 2 cores)
	@sh scripts/bootstrap.sh --engines
	@.venv-engines/bin/python -m pytest -q $(wildcard tests/engines/test_vllm*.py) tests/engines/test_transformers.py
	@.venv-engines/bin/python -m pytest -q $(filter-out $(ALONE),$(wildcard tests/engines/test_sglang*.py))
	@for test in $(ALONE); do .venv-engines/bin/python -m pytest -q $$test || exit 1; done

test-engines-long: ## the simulator's kernels in vLLM and SGLang, for families of models (20 minutes on 2 cores)
	@sh scripts/bootstrap.sh --engines
	@.venv-engines/bin/python -m pytest -q -m long $(wildcard tests/engines/test_vllm*.py)
	@.venv-engines/bin/python -m pytest -q -m long tests/engines/test_sglang.py tests/engines/test_sglang_mla.py

bench: venv ## speed of the simulator on this machine
	@$(PY) scripts/bench_sim.py

lint: venv ## ruff: lint and format check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: venv ## ruff: apply formatting and safe fixes
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## remove what runs leave behind, not .venv
	rm -rf out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
