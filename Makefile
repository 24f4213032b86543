# make serve       set up, then serve the default model:  make serve ARGS="--port 9000"
# make test        set up, then run the tests             make test-all  also the slow ones
# make lint types  ruff, mypy                             make wheel     the client SDK, into dist/

PYTHON ?= python3
MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS ?=
BIN := .venv/bin

.PHONY: setup serve test test-all lint types wheel

setup:
	@$(PYTHON) -m tools.setup

serve: setup
	@exec $(BIN)/python -m launch --model $(MODEL) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Built from a copy, so that the build leaves nothing inside ipc/.
wheel: setup
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cp ipc/*.py ipc/pyproject.toml LICENSE "$$folder" && \
	mkdir -p dist && $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --no-index --wheel-dir dist "$$folder" && ls dist/tokenmill_client-*.whl
