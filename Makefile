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
# Another environment, of the same Python, whose packages are seen here beside those that are installed here.
BASE ?=
# The CUDA toolkit that `make test-cuda` compiles with.
CUDA ?= 12
# Of its tests, `cuda` (all) or `toolkits` (a handful).
CUDA_TESTS ?= cuda
# What to test, as files or folders of tests/; empty means all.
PART ?=
# Of `make test-rest`: the second of six parts is 2/6, and TOUCHED are folders of which more is run; empty means all.
SHARD ?=
TOUCHED ?=
# Of `make bench`; empty means the machine's.
SUITES ?=
# How far LLVM optimises, 0 to 3; empty: as little as tests/support/flags.py says, in a quarter of the time.
OPTIMISE ?=
# The newest instructions that XLA compiles for, as AVX2; empty: those of the machine. Its libraries look for themselves.
ISA ?=
# The CPU of `make test-emulated`, as QEMU names it.
EMULATED ?= EPYC-Milan
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal

BIN := $(VENV)/bin
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
# Not empty if PYTHON, or BASE's, is not the one that $(VENV) was made with, which is then made anew.
WANTED := $(if $(BASE),$(BASE)/bin/python,$(PYTHON))
OTHER := $(if $(WANTED),$(shell said='import sys; print(sys.version)'; \
    [ "$$($(WANTED) -c "$$said" 2>&1)" = "$$($(BIN)/python -c "$$said" 2>/dev/null)" ] || echo FORCE))
# Prints a Python for the newest JAX: PYTHON, one that is found, or one unpacked into $(VENV)-python.
NEWER := PYTHON='$(PYTHON)' tools/newer_python.sh $(VENV)-python
# Targets in environments of their own: with some packages, JAX looks for their hardware whenever it starts. These lie on
# another environment, and have what it lacks. The CUDA plugins are of JAX's own version: with CUDA 12, the newest that
# Python 3.11 has.
IN = $(MAKE) --no-print-directory
ON_NEWEST = VENV=$(VENV)-newest PYTHON="$$($(NEWER))"
ON_TPU = VENV=$(VENV)-tpu BASE=$(VENV) TEST_EXTRAS=tpu
ON_CUDA12 = VENV=$(VENV)-cuda12 BASE=$(VENV) TEST_EXTRAS=cuda12-compiler JAX='jax==0.10.2 jax-cuda12-plugin==0.10.2'
ON_CUDA13 = VENV=$(VENV)-cuda13 BASE=$(VENV)-newest TEST_EXTRAS=cuda13-compiler JAX='jax jax-cuda13-plugin'
ELSEWHERE := tpu or cuda or flash or fa4
FLAGS = $(strip $(OPTIMISE:%=--xla_backend_optimization_level=%) $(ISA:%=--xla_cpu_max_isa=%))
ROTATION = $(SHARD:%=--shard=%) $(TOUCHED:%=--touched=%)

# The MkDocs theme says at every start what it thinks of MkDocs 2; pyright, that there is a newer pyright. Modules that
# are compiled once are read the next time, here and by each process of a run, whatever the shell says.
export NO_MKDOCS_2_WARNING := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-newest test-full test-rest test-emulated test-tpu test-cuda test-cuda12 test-cuda13 test-flash test-fa4 test-device \
    check mutants bench docs clean environment environments environment-newest environment-tpu environment-cuda12 environment-cuda13 \
    .installed FORCE

help:
	@echo "make demo    decode over eight devices with a small trained model, compare with the dense answer"
	@echo "make test    the tests; PART=tests/kernels/masks: those of some folders or files"
	@echo "make test-newest    some 250 of them on the newest JAX, which needs Python 3.12: found, or unpacked on Debian"
	@echo "make test-full    all of them, those that take long too; OPTIMISE=3: programs optimised as users have them"
	@echo "make test-rest    what is in test-full, but not in test; SHARD=2/6: the second of six parts"
	@echo "make test-emulated    bits on a CPU without AVX-512, which QEMU emulates; EMULATED=Haswell: on another"
	@echo "make test-tpu, test-cuda    programs compiled for TPU pods and for GPUs"
	@echo "make test-cuda CUDA=13    the same with CUDA 13, on the newest JAX"
	@echo "make test-flash, test-fa4    programs for GPUs with flash-attn-jax, with fa4-jax"
	@echo "make test-device JAX='jax[cuda13]'    the tests of kernels on the accelerator at hand"
	@echo "make check   format, lint, types, structure, the documentation's links"
	@echo "make mutants    planted faults, and which test of their folder finds each"
	@echo "make bench   times and memory compared with jax.nn and PyTorch; SUITES='masks llama': some suites"
	@echo "make docs    the documentation, into site/; PAGES=docs/tutorial.md: run its blocks and rewrite their outputs, before"
	@echo "make clean   remove what the targets made, the environment included"

demo: $(VENV)/.installed-plot
	$(BIN)/python -m energy_attn demo

test: $(VENV)/.installed-$(TEST_EXTRAS)
	$(if $(FLAGS),XLA_FLAGS="$(FLAGS) $$XLA_FLAGS") $(UNDER) $(BIN)/python -m pytest $(PYTEST_ARGS) $(PART)

test-full:
	@$(IN) PYTEST_ARGS="$(PYTEST_ARGS) -m 'not ($(ELSEWHERE))'" test

test-rest:
	@$(IN) PYTEST_ARGS="$(PYTEST_ARGS) -m 'full and not ($(ELSEWHERE))' $(ROTATION)" test

test-newest: environment-newest
	@$(IN) $(ON_NEWEST) PYTEST_ARGS="$(PYTEST_ARGS) -m 'smoke and not full or readme'" test

# Bits that rest on a CPU's instructions: XLA's libraries choose kernels by what the CPU has, whatever ISA= says.
test-emulated: $(VENV)/.installed-test
	@command -v qemu-x86_64 >/dev/null || { apt-get update -q && apt-get install -y -q qemu-user; }
	@$(IN) UNDER='qemu-x86_64 -cpu $(EMULATED)' PYTEST_ARGS='-n 0 -m emulated' PART='$(or $(PART),tests/energy_attn/models)' test

# Compilers take most of the time, so the files go to several processes, of which libtpu is told. Without the hardware
# JAX cannot read the programs that it stores, so that it stores none.
test-tpu: environment-tpu
	@ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_ENABLE_COMPILATION_CACHE=false $(IN) $(ON_TPU) OPTIMISE=3 PYTEST_ARGS='$(PYTEST_ARGS) -m tpu $(ROTATION)' PART='$(or $(PART),tests/tpu)' test

test-cuda: test-cuda$(CUDA)

test-cuda12: environment-cuda12
	@JAX_ENABLE_COMPILATION_CACHE=false $(IN) $(ON_CUDA12) OPTIMISE=3 PYTEST_ARGS='$(PYTEST_ARGS) -m $(CUDA_TESTS) $(ROTATION)' PART='$(or $(PART),tests/cuda)' test

test-cuda13: environment-cuda13
	@JAX_ENABLE_COMPILATION_CACHE=false $(IN) $(ON_CUDA13) OPTIMISE=3 PYTEST_ARGS='$(PYTEST_ARGS) -m $(CUDA_TESTS) $(ROTATION)' PART='$(or $(PART),tests/cuda)' test

# The plugin looks for libraries that only programs which run need.
test-flash:
	@JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(IN) OPTIMISE=3 VENV=$(VENV)-flash TEST_EXTRAS=test,flash PYTEST_ARGS='-m flash tests/cuda' \
	    JAX='jax>=0.8,<0.9 jax-cuda12-plugin>=0.8,<0.9 nvidia-cuda-nvcc-cu12' test

# Compiles CuTe's kernels for H100 where there is no GPU to ask.
test-fa4:
	@CUTE_DSL_ARCH=sm_90a $(IN) VENV=$(VENV)-fa4 TEST_EXTRAS=test,fa4 PYTHON="$$($(NEWER))" PYTEST_ARGS='-m fa4 tests/cuda' test

test-device:
	@JAX_PLATFORMS= $(IN) OPTIMISE=3 VENV=$(VENV)-device PYTEST_ARGS='tests/kernels' test

check: environment
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_prose.py
	$(BIN)/python -m pytest -q -m structure tests/repository
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

mutants: $(VENV)/.installed-test
	$(BIN)/python tools/mutants.py

bench: $(VENV)/.installed-plot $(VENV)/.installed-torch
	$(BIN)/python -m benchmarks $(SUITES)

docs: $(VENV)/.installed-docs
	$(if $(PAGES),$(BIN)/python tools/pages.py $(PAGES))
	$(BIN)/mkdocs build --strict

# What continuous integration installs; all but the first beside something else.
environment: $(VENV)/.installed-check,docs,models,plot,test

environments: environment-newest environment-tpu environment-cuda12 environment-cuda13

environment-newest:
	@$(IN) $(ON_NEWEST) .installed

environment-tpu: $(VENV)/.installed-test
	@$(IN) $(ON_TPU) .installed

environment-cuda12: $(VENV)/.installed-test
	@$(IN) $(ON_CUDA12) .installed

environment-cuda13: environment-newest
	@$(IN) $(ON_CUDA13) .installed

.installed: $(VENV)/.installed-$(TEST_EXTRAS)

clean:
	rm -rf $(VENV) $(addprefix $(VENV)-,python newest tpu cuda12 cuda13 flash fa4 device) build dist site energy_attn.egg-info demo.png

PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"), end="")'

ifeq ($(BASE),)
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
else
$(BIN)/python: $(OTHER)
	@echo "making $(VENV) on $(BASE)"
	@$(BASE)/bin/python -m venv --clear --without-pip $(VENV)
	@echo "import site; site.addsitedir('$$($(BASE)/bin/python $(PACKAGES))')" >"$$($(BIN)/python $(PACKAGES))/base.pth"
endif

$(VENV)/.installed-torch: $(BIN)/python
	@echo "installing $(TORCH) and transformers"
	@$(BIN)/python -m pip install -qq $(TORCH) transformers
	@touch $@

$(VENV)/.installed-%: $(VENV)/.jax pyproject.toml
	@echo "installing .[$*]"
	@$(BIN)/python -m pip install -qq --no-compile --upgrade --editable '.[$*]' $(foreach wanted,$(JAX),'$(wanted)')
	@touch $@

# Newer than what is installed if another JAX is asked for than the last time.
$(VENV)/.jax: $(BIN)/python FORCE
	@echo '$(JAX)' | cmp -s - $@ || echo '$(JAX)' >$@

FORCE:
