"""The same request gives the same tokens, greedy and sampled with a seed, whatever the scheduler does with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.sse import Answer, post_all
from tests.e2e.test_serving import metric

FLAGS = ("--dtype", "float32", "--served-model-name", "smol", "--threads", "1")
KV_BYTES = 23040  # of one token in float16
BLOCK = 16
MARGIN = 0.5  # the reference rounded the weights to bfloat16; here they are integers, and activations int8


def bodies(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each reference row greedily, and sampled at temperature 1; every second one also with penalties and logprobs."""
    common = [
        {
            "model": "smol",
            "prompt": row["prompt_ids"],
            "max_tokens": len(row["output_ids"]),
            "return_token_ids": True,
        }
        for row in rows
    ]
    greedy = [{**body, "temperature": 0} for body in common]
    sampled = [{**body, "temperature": 1, "seed": seed} for seed, body in enumerate(common)]
    fields = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "logprobs": 2}
    return (
        greedy + sampled + [{**body, **fields, "min_tokens": min(9, body["max_tokens"])} for body in sampled[::2]]
    )  # the last ones: B078


def outputs(answers: list[Answer]) -> list[tuple[list[int], Any]]:
    """Token ids and log-probabilities, which have to be the same to the last bit."""
    assert all(answer.status == 200 for answer in answers), [answer.body for answer in answers if answer.status != 200]
    choices = [answer.body["choices"][0] for answer in answers]
    return [(choice["token_ids"], choice["logprobs"]) for choice in choices]


def cached(answers: list[Answer]) -> int:
    return sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)


def in_batches_of_32(url: str, requests: list[dict[str, Any]]) -> list[Answer]:
    answers: list[Answer] = []
    for first in range(0, len(requests), 32):
        answers += post_all(url, requests[first : first + 32])
    return answers


def check_identity(model_path: Path, rows: list[dict[str, Any]]) -> None:
    """Alone, in batches of 32, in chunks of 64 tokens, with a cached prefix, preempted midway."""
    requests = bodies(rows)
    with Server(model_path, *FLAGS, "--no-prefix-cache") as server:
        url = server.url + "/v1/completions"
        alone = outputs(post_all(url, requests, at_once=False))
        assert outputs(in_batches_of_32(url, requests)) == alone, "in batches of 32"
    for row, (token_ids, _) in zip(rows, alone, strict=False):
        pairs = enumerate(zip(token_ids, row["output_ids"], strict=False))
        first = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        assert first is None or row["margins"][first] < MARGIN, f"{row['id']}: token {first}"
    with Server(model_path, *FLAGS, "--prefill-chunk", "64") as server:
        url = server.url + "/v1/completions"
        first = in_batches_of_32(url, requests)
        assert outputs(first) == alone, "in chunks of 64 tokens"
        again = in_batches_of_32(url, requests)
        assert outputs(again) == alone, "with a cached prefix"
        long_enough = sum((len(row["prompt_ids"]) - 1) // BLOCK * BLOCK for row in rows)
        assert cached(again) >= 2 * long_enough, "all full blocks of all prompts"
    longest = max(len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows)
    pool = (-(-longest // BLOCK) + 8) * BLOCK
    for shortage in ("recompute", "swap"):
        flags = ("--kv-memory", str(pool * KV_BYTES), "--max-model-len", str(longest), "--kv-shortage", shortage)
        with Server(model_path, *FLAGS, *flags) as server:
            answers = in_batches_of_32(server.url + "/v1/completions", requests)
            assert outputs(answers) == alone, f"preempted, with {shortage}"
            preemptions = metric(server, "num_preemptions_total")
            assert preemptions > 0
            print(f"{shortage}: {preemptions:.0f} preemptions")
    print(f"{len(requests)} requests gave the same tokens under every condition")


def test_some_rows(model_path: Path, shared_dir: Path) -> None:
    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()]
    check_identity(model_path, rows[3::32])


@pytest.mark.slow
def test_every_row(model_path: Path, shared_dir: Path) -> None:
    check_identity(model_path, [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()])
