# Two commands do everything: `make serve` and `make test`. Both create .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PORT ?= 30000
ARGS ?=

# PyTorch's own index has CPU builds of torch and torchvision. Where it cannot be reached, pip gives up on it at
# once and takes what its configured places have.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help setup serve test lint format bench fidelity bench-vllm-env lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## create .venv from requirements/cpu.lock (nothing to do when it is up to date)

$(STAMP): requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-deps --no-compile --retries 0 --extra-index-url $(TORCH_INDEX) \
	  $$(grep -E '^torch(vision)?==' requirements/cpu.lock)
	$(BIN)/pip install -q --no-deps --no-compile -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

serve: $(STAMP)  ## serve the demo model on PORT (30000)
	$(BIN)/fathom serve --demo --port $(PORT) $(ARGS)

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_path/fathom && cd .mypy_path/fathom && \
	  for room in server runtime kernels benchmarks demo; do ln -sfn ../../$$room $$room; done
	$(BIN)/mypy

format: $(STAMP)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure Fathom against stock SGLang on this machine
	$(BIN)/fathom bench $(ARGS)

fidelity: $(STAMP)  ## exact match of policies x tasks x prompt lengths, on the demo model
	$(BIN)/fathom fidelity $(ARGS)

bench-vllm-env: $(STAMP)  ## create .venv-vllm for `make bench ARGS="--peer vllm"`
	$(BIN)/python -m fathom.benchmarks.vllm_env

lock:  ## resolve requirements/cpu.in anew (needs uv)
	uv pip compile requirements/cpu.in --override requirements/cpu.exclude --python-version 3.11 \
	  --find-links $${PIP_FIND_LINKS:-.} --no-header --no-annotate -q | sed 's/^torch==.*/torch==2.13.0/' \
	  > requirements/cpu.lock

clean:  ## remove the environment, caches and build products
	rm -rf $(VENV) .venv-vllm .bench build dist *.egg-info .mypy_path .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
