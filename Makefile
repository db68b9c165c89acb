# Every target is enough by itself on a fresh machine with Python 3.11 or newer: it makes an environment in $(VENV),
# installs what it needs there (once: stamp files remember it), and runs.

VENV ?= .venv
# PYTHON: the interpreter to build the environment with; empty means the first suitable one found.
PYTHON ?=
# What pip is asked for: JAX='jax>=0.8,<0.9' tests another jax (and may name more, with spaces between);
# TEST_EXTRAS=test,flash adds an extra.
JAX ?= jax
TORCH ?= torch==2.13.0
TEST_EXTRAS ?= test
# The CUDA toolkit that `make test-cuda` compiles with.
CUDA ?= 12
# What to test, as files or folders of tests/; empty means all.
PART ?=
# How far LLVM optimises, 0 to 3; empty: as little as tests/support/flags.py says, in a quarter of the time.
OPTIMISE ?=
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal

BIN := $(VENV)/bin
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
# Not empty if PYTHON is not the one that $(VENV) was made with, which is then made anew.
OTHER := $(if $(PYTHON),$(shell said='import sys; print(sys.version)'; \
    [ "$$($(PYTHON) -c "$$said" 2>&1)" = "$$($(BIN)/python -c "$$said" 2>/dev/null)" ] || echo FORCE))
# Prints a Python for the newest JAX: PYTHON, one that is found, or one unpacked into $(VENV)-python.
NEWER := PYTHON='$(PYTHON)' tools/newer_python.sh $(VENV)-python

# The MkDocs theme says at every start what it thinks of MkDocs 2; pyright, that there is a newer pyright.
export NO_MKDOCS_2_WARNING := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-newest test-full test-rest test-tpu test-cuda test-cuda12 test-cuda13 test-flash test-fa4 test-device \
    check bench docs clean FORCE

help:
	@echo "make demo    decode over eight devices with a small trained model, compare with the dense answer"
	@echo "make test    the tests; PART=tests/kernels: some of them"
	@echo "make test-newest    the tests on the newest JAX, which needs Python 3.12: found, or unpacked on Debian"
	@echo "make test-full    all of them, those that take long too; OPTIMISE=3: programs optimised as users have them"
	@echo "make test-rest    what is in test-full, but not in test"
	@echo "make test-tpu, test-cuda    programs compiled for TPU pods and for GPUs"
	@echo "make test-flash, test-fa4    programs for GPUs with flash-attn-jax, with fa4-jax"
	@echo "make test-cuda CUDA=13    the same with CUDA 13, on the newest JAX"
	@echo "make test-device JAX='jax[cuda13]'    the tests of kernels on the accelerator at hand"
	@echo "make check   format, lint, types, import direction, documentation"
	@echo "make bench   times and memory beside jax.nn and PyTorch"
	@echo "make docs    the documentation, into site/"
	@echo "make clean   remove what the targets made, the environment included"

demo: $(VENV)/.installed-plot
	$(BIN)/python -m energy_attn demo

test: $(VENV)/.installed-$(TEST_EXTRAS)
	$(if $(OPTIMISE),XLA_FLAGS="--xla_backend_optimization_level=$(OPTIMISE) $$XLA_FLAGS") $(BIN)/python -m pytest $(PYTEST_ARGS) $(PART)

test-newest:
	@python=$$($(NEWER)) && $(MAKE) --no-print-directory PYTHON="$$python" VENV=$(VENV)-newest test

test-full:
	@$(MAKE) --no-print-directory PYTEST_ARGS="$(PYTEST_ARGS) -m 'not (tpu or cuda or flash or fa4)'" test

test-rest:
	@$(MAKE) --no-print-directory PYTEST_ARGS="$(PYTEST_ARGS) -m full" test

# Each in an environment of its own: with these packages, JAX looks for their hardware whenever it starts.
test-tpu:
	@$(MAKE) --no-print-directory OPTIMISE=3 VENV=$(VENV)-tpu TEST_EXTRAS=test,tpu PYTEST_ARGS='-m tpu tests' test

# CUDA's compiler takes most of the time, so the files go to several processes; libtpu allows one.
# The plugin must be of JAX's own version; with CUDA 12, the newest that Python 3.11 has.
test-cuda: test-cuda$(CUDA)

test-cuda12:
	@$(MAKE) --no-print-directory OPTIMISE=3 VENV=$(VENV)-cuda12 TEST_EXTRAS=test,cuda12-compiler PYTEST_ARGS='$(PYTEST_ARGS) -m cuda' \
	    JAX='jax==0.10.2 jax-cuda12-plugin==0.10.2' test

test-cuda13:
	@python=$$($(NEWER)) && $(MAKE) --no-print-directory OPTIMISE=3 VENV=$(VENV)-cuda13 TEST_EXTRAS=test,cuda13-compiler \
	    PYTHON="$$python" PYTEST_ARGS='$(PYTEST_ARGS) -m cuda' JAX='jax jax-cuda13-plugin' test

# The plugin looks for libraries that only programs which run need.
test-flash:
	@JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(MAKE) --no-print-directory OPTIMISE=3 VENV=$(VENV)-flash TEST_EXTRAS=test,flash PYTEST_ARGS='-m flash tests' \
	    JAX='jax>=0.8,<0.9 jax-cuda12-plugin>=0.8,<0.9 nvidia-cuda-nvcc-cu12' test

# Compiles CuTe's kernels for H100 where there is no GPU to ask.
test-fa4:
	@python=$$($(NEWER)) && CUTE_DSL_ARCH=sm_90a $(MAKE) --no-print-directory VENV=$(VENV)-fa4 TEST_EXTRAS=test,fa4 \
	    PYTHON="$$python" PYTEST_ARGS='-m fa4 tests' test

test-device:
	@JAX_PLATFORMS= $(MAKE) --no-print-directory OPTIMISE=3 VENV=$(VENV)-device PYTEST_ARGS='tests/kernels' test

check: $(VENV)/.installed-check,docs,models,plot $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_structure.py
	$(BIN)/python -m pytest -q -m structure tests
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/check_types.py
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-bench $(VENV)/.installed-torch
	$(BIN)/python -m energy_attn bench

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(addprefix $(VENV)-,python newest tpu cuda12 cuda13 flash fa4 device) .jax_cache build dist site energy_attn.egg-info demo.png

$(BIN)/python: $(OTHER)
	@for python in $(CANDIDATES); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "making $(VENV) with $$("$$python" --version)"; \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "energy_attn needs Python 3.11 or newer with its venv module; none of these is one: $(CANDIDATES)." >&2; \
	echo "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=..." >&2; \
	exit 1

$(VENV)/.installed-torch: $(BIN)/python
	@echo "installing $(TORCH) and transformers"
	@$(BIN)/python -m pip install -qq $(TORCH) transformers
	@touch $@

$(VENV)/.installed-%: $(VENV)/.jax pyproject.toml
	@echo "installing .[$*]"
	@$(BIN)/python -m pip install -qq --upgrade --editable '.[$*]' $(foreach wanted,$(JAX),'$(wanted)')
	@touch $@

# Newer than what is installed if another JAX is asked for than the last time.
$(VENV)/.jax: $(BIN)/python FORCE
	@echo '$(JAX)' | cmp -s - $@ || echo '$(JAX)' >$@

FORCE:
