"""A small model served with the GPU kernels, which Triton interprets here: the same answers as with the CPU's."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.e2e.server import Server
from tests.unit.gpu_workers.tiny import save_tiny

VOCABULARY = 320
SENTENCES = ["the quick brown fox jumps over the lazy dog", "a stitch in time saves nine", "all that glitters"]
# In the order of arrival: greedy, drawn, with penalties, with a schema, with log-probabilities.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "the quick brown fox", "temperature": 0},
    {"prompt": "the quick brown fox jumps over", "temperature": 0, "logprobs": 3},
    {"prompt": "a stitch in time " * 4, "temperature": 1, "seed": 7, "top_p": 0.9},
    {"prompt": "all that", "temperature": 0.8, "seed": 8, "top_k": 20, "frequency_penalty": 1.0},
    {"prompt": "in time", "temperature": 0, "repetition_penalty": 1.3, "min_tokens": 5},
    {"prompt": "fox", "temperature": 0, "structured_outputs": {"regex": "[a-z]{3,6} [0-9]{2}"}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, heads of 16 dimensions and a tokenizer that knows a few words."""
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, hidden_size=96, num_hidden_layers=2, vocab_size=VOCABULARY, eos_token_id=1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def answers(model: Path, *flags: str) -> list[Any]:
    """Of all requests at once, without ids and times."""
    shared = ("--dtype", "float32", "--kv-dtype", "float32", "--kv-memory", "4MiB", "--max-seqs", "4")
    chunks = ("--max-step-tokens", "16", "--block-size", "4", "--served-model-name", "tiny")
    with Server(model, *shared, *chunks, *flags) as server:

        def ask(request: dict[str, Any]) -> Any:
            body = {"model": "tiny", "max_tokens": 12, "ignore_eos": "structured_outputs" not in request, **request}
            sent = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(sent, timeout=240) as answer:
                return json.load(answer)

        with ThreadPoolExecutor(len(REQUESTS)) as clients:
            found = list(clients.map(ask, REQUESTS))
    # At the end, too: libraries in C++ list what is left of them there, unless everything is freed.
    assert [line for line in server.stderr.splitlines() if not line.startswith(("[", "try: "))] == []
    return found


def test_the_same_answers_as_with_the_kernels_of_the_cpu(model: Path) -> None:
    """With chunks of prompts, a prefix shared, more requests than rows, and graphs (imitated) of decode steps."""
    expected = answers(model, "--kernels", "torch")
    found = answers(model, "--kernels", "triton", "--max-graph-seqs", "4")
    assert len({answer["choices"][0]["text"] for answer in expected}) == len(REQUESTS)
    for ours, theirs in zip(found, expected, strict=True):
        [choice], [other] = ours["choices"], theirs["choices"]
        assert choice["text"] == other["text"]
        assert choice["finish_reason"] == other["finish_reason"]
        assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
