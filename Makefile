# Two commands do everything: `make serve` and `make test`. Both create .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
FLASHINFER := $(VENV)/flashinfer/.installed
GPU_TRITON := $(VENV)/gpu-triton/.installed
PORT ?= 30000
WATCH_PORT ?= 9090
ARGS ?=
# Files that are tested at the same time; each has servers of its own (1.5 GB each).
WORKERS ?= 2

# The packages are installed without byte code: each module that is ever imported is compiled once and kept. Where
# the environment forbids that, every process of a server would compile all of them anew (10 s each).
export PYTHONDONTWRITEBYTECODE :=

# PyTorch's own index has CPU builds of torch and torchvision. Where it cannot be reached, pip gives up on it at
# once and takes what its configured places have.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Half of all bytes, installed beside the rest.
LARGE := ^(torch|torchvision|triton)==

.PHONY: help setup serve watch test fuzz lint format bench fidelity bench-vllm-env image-steps lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## create .venv from requirements/cpu.lock (nothing to do when it is up to date)

# Fathom needs 3.11 or later; the locked outlines-core has no wheel for 3.13.
PYTHONS := 3.11 3.12

$(STAMP): requirements/cpu.lock pyproject.toml
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') && case " $(PYTHONS) " in *" $$version "*) ;; \
	  *) echo "PYTHON ($(PYTHON)) is Python $$version; the locked packages are for $(PYTHONS) only: make PYTHON=python3.11 …" >&2; exit 1;; esac
	$(PYTHON) -m venv $(VENV)
	grep -E '$(LARGE)' requirements/cpu.lock \
	  | $(BIN)/pip install -q --no-deps --no-compile --retries 0 --extra-index-url $(TORCH_INDEX) -r /dev/stdin & large=$$!; \
	grep -vE '$(LARGE)' requirements/cpu.lock | $(BIN)/pip install -q --no-deps --no-compile -r /dev/stdin && wait $$large
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(TEST_STAMP): $(STAMP) requirements/test.lock
	$(BIN)/pip install -q --no-deps --no-compile -r requirements/test.lock
	@touch $@

# What a GPU gets, beside the environment and not in it. FlashInfer's Python, for the calls that the engine makes (the
# wheel holds no kernels): SGLang imports it wherever it finds it, and a server without a GPU has none. Triton, to
# compile the kernels: its interpreter cannot run them, the environment has a later one.
$(FLASHINFER): LOCKED := flashinfer-python
$(GPU_TRITON): LOCKED := triton
$(FLASHINFER) $(GPU_TRITON): $(STAMP) requirements/cuda.lock
	grep '^$(LOCKED)==' requirements/cuda.lock \
	  | $(BIN)/pip install -q --no-deps --no-compile --upgrade --target $(@D) -r /dev/stdin
	@touch $@

serve: $(STAMP)  ## serve the demo model on PORT (30000)
	$(BIN)/fathom serve --demo --port $(PORT) $(ARGS)

watch:  ## Prometheus on WATCH_PORT (9090), watching the server of `make serve` on PORT
	@mkdir -p .bench
	sed 's/:30000/:$(PORT)/' docker/prometheus.local.yaml > .bench/prometheus.yaml
	prometheus --config.file=.bench/prometheus.yaml --storage.tsdb.path=.bench/prometheus \
	  --web.listen-address=127.0.0.1:$(WATCH_PORT) --log.level=warn

# Workers share the cores: threads that wait for others sleep.
test: $(TEST_STAMP) $(FLASHINFER) $(GPU_TRITON)  ## run all tests
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

fuzz: $(TEST_STAMP)  ## random servers and requests against the oracles (ARGS="--seed 7 --minutes 10")
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

lint: $(TEST_STAMP)  ## ruff, mypy, hadolint and pip-audit
	$(BIN)/hadolint docker/Dockerfile.cpu docker/Dockerfile.cuda
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_path/fathom && cd .mypy_path/fathom && \
	  for room in server runtime kernels benchmarks demo; do ln -sfn ../../$$room $$room; done
	$(BIN)/mypy
	$(BIN)/python requirements/audit.py requirements/cpu.lock requirements/test.lock

format: $(STAMP)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure Fathom against stock SGLang on this machine
	$(BIN)/fathom bench $(ARGS)

fidelity: $(STAMP)  ## exact match of policies x tasks x prompt lengths, on the demo model
	$(BIN)/fathom fidelity $(ARGS)

bench-vllm-env: $(STAMP)  ## create .venv-vllm for `make bench ARGS="--peer vllm"`
	$(BIN)/python -m fathom.benchmarks.vllm_env

image-steps: $(STAMP)  ## run the steps of docker/Dockerfile.cpu in an empty folder, without Docker (minutes)
	$(BIN)/python docker/run_steps.py docker/Dockerfile.cpu $(ARGS)

lock:  ## resolve requirements/*.in anew (needs uv)
	uv pip compile requirements/cpu.in --override requirements/cpu.exclude --python-version 3.11 \
	  --find-links $${PIP_FIND_LINKS:-.} --no-header --no-annotate -q | sed 's/^torch==.*/torch==2.13.0/' \
	  > requirements/cpu.lock
	uv pip compile requirements/test.in --constraint requirements/cpu.lock --python-version 3.11 \
	  --no-header --no-annotate -q | grep -v '^pip==' | grep -vxFf requirements/cpu.lock > requirements/test.lock
	grep -vE '^(triton|torchvision)==' requirements/cpu.lock > requirements/.shared
	UV_FIND_LINKS= uv pip compile pyproject.toml requirements/cuda.in --constraint requirements/.shared \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_39 --no-header --no-annotate -q -o requirements/cuda.lock
	rm requirements/.shared

clean:  ## remove the environment, caches and build products
	rm -rf $(VENV) .venv-vllm .bench build dist *.egg-info .mypy_path .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
