# `make demo`, `make test` (minutes) and `make test-all` (slow tests too: an hour of a core; CI does not run
# them, so whoever changes kernels, trials or the emulator does); each makes the environment it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV ?= .venv
OUT ?= out/demo
BIN = $(VENV)/bin

DEFINITION ?= gemm_n4096_k4096
AXES ?= M=1024
CHECKPOINT = $(OUT)/train/checkpoint.safetensors
INSTALL = echo "$(VENV): pip downloads what is missing of PyTorch and the rest: hundreds of MB," \
	"gigabytes where the build of PyTorch brings CUDA" && $(BIN)/python -m pip install --no-compile -e

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Python compiles the modules that are imported, once, rather than pip all that there are
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test types quick test-all bytecode clean

demo: $(VENV)/.installed
	$(BIN)/python train.py --preset demo --out $(OUT)/train
	$(BIN)/python sample.py --definition $(DEFINITION) --axes $(AXES) -k 8 \
		--checkpoint $(CHECKPOINT) --out $(OUT)/kernels
	@echo && echo "Written:" && find $(OUT) -type f | sort

test:
	@$(MAKE) --no-print-directory -j 2 bytecode $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j 2 types quick

# once, while pip leaves a core idle, rather than by each process of the tests
bytecode:
	@$(PYTHON) -m compileall compiler env gfn eval > /dev/null

# at once: mypy has one process, and leaves the other core idle
types: $(VENV)/.installed-test
	$(BIN)/mypy

# a test that hangs ends after five minutes, with the stacks of all threads
quick: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -o faulthandler_timeout=300 \
		-o faulthandler_exit_on_timeout=true

test-all: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow"

clean:
	rm -rf $(VENV) out build dist ptxflow.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@$(INSTALL) .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@$(INSTALL) ".[test]"
	@touch $@ $(VENV)/.installed
