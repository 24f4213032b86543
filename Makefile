# make serve       set up, then serve the default model:  make serve ARGS="--port 9000"
# make test        set up, then run the tests             make test-all  also the slow ones
# make lint types  ruff, mypy                             make wheel     the client SDK, into dist/

PYTHON ?= python3
MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS ?=
BIN := .venv/bin
WHEEL := ipc/*.py ipc/py.typed ipc/README.md ipc/pyproject.toml LICENSE

.PHONY: setup serve test test-all lint types wheel

setup:
	@$(PYTHON) -m tools.setup

serve: setup
	@exec $(BIN)/python -m launch --model $(MODEL) $(ARGS)

# Files of tests on two cores at once, those with the real server first and one after the other (ARGS="-n 0": all so).
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Built from a copy, so that the build leaves nothing inside ipc/.
wheel: setup
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cp $(WHEEL) "$$folder" && \
	mkdir -p dist && $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --no-index --wheel-dir dist "$$folder" && ls dist/tokenmill_client-*.whl
