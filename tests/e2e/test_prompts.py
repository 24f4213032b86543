"""Prompts as the server tells of them: log-probabilities, echo, tokens; with the real model."""

import json
import re
import urllib.request
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from ipc import BadRequest, Client
from tests.e2e.server import SMALL, Server
from tests.e2e.sse import Answer, post_all
from tests.exposition import value

COMPLETIONS = "/v1/completions"
A = "The history of the city begins with a small harbour at the mouth of the river, where merchants met. " * 12
B = "Later a wall was built around it."
C = "Ships came from far away."


def scored(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "smol", "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, **fields}


def values(answer: Answer) -> list[float]:
    """Log-probabilities of the prompt's own tokens, from vLLM's form."""
    assert answer.status == 200, answer.body
    listed = answer.body["choices"][0]["prompt_logprobs"]
    assert listed[0] is None
    return [next(iter(entry.values()))["logprob"] for entry in listed[1:]]


@pytest.fixture(scope="module")
def rows(shared_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()]
    return [row for row in rows if len(row["prompt_ids"]) < 300][:8]


def test_scoring_the_reference_gives_the_log_probabilities_of_transformers(
    server: Server, rows: list[dict[str, Any]]
) -> None:
    """Prompt and output as one prompt: at the output's places stand the reference's five best, within rounding."""
    bodies = [
        scored(row["prompt_ids"] + row["output_ids"], max_tokens=0, echo=True, logprobs=5, prompt_logprobs=5)
        for row in rows
    ]
    errors = []
    for row, answer in zip(rows, post_all(server.url + COMPLETIONS, bodies), strict=True):
        assert answer.usage["completion_tokens"] == 0
        choice = answer.body["choices"][0]
        first = len(row["prompt_ids"])
        listed = choice["prompt_logprobs"][first:]
        echoed = choice["logprobs"]
        assert len(listed) == len(row["output_ids"])
        for at, (token_id, top, entry) in enumerate(zip(row["output_ids"], row["top5"], listed, strict=True)):
            known = {int(key): value["logprob"] for key, value in entry.items()}
            errors.append(abs(known[token_id] - dict(top)[token_id]))
            assert echoed["token_logprobs"][first + at] == entry[str(token_id)]["logprob"]
            assert len(entry) in (5, 6)
            best = max(entry.values(), key=lambda value: value["logprob"])
            assert best["rank"] == 1
    assert len(errors) > 200
    assert mean(errors) < 0.1
    assert max(errors) < 0.8


def test_a_scored_output_has_the_bits_it_was_generated_with(server: Server) -> None:
    """A token's log-probability is the same from a decode step and from a prefill of any chunk."""
    ask = {
        "model": "smol",
        "prompt": "The sea is",
        "max_tokens": 40,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
    }
    (generated,) = post_all(server.url + COMPLETIONS, [{**ask, "return_token_ids": True}])
    choice = generated.body["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    (again,) = post_all(server.url + COMPLETIONS, [scored(ids, max_tokens=0, prompt_logprobs=2)])
    assert values(again)[-40:] == choice["logprobs"]["token_logprobs"]


def test_b020_echo_with_logprobs_of_a_cached_prompt(server: Server) -> None:
    ask = {"model": "smol", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    bodies = [
        {**ask, "prompt": A},
        {**ask, "prompt": A},
        {**ask, "prompt": A + B},
        {**ask, "prompt": A, "stream": True},
    ]
    first, second, longer, streamed = post_all(server.url + COMPLETIONS, bodies, at_once=False)
    assert first.usage["prompt_tokens"] > 200
    for answer in (first, second, longer):
        logprobs = answer.body["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == answer.usage["prompt_tokens"] + 1
        assert "".join(logprobs["tokens"]) == answer.text
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert answer.text[offset : offset + len(token)] == token
    assert first.body["choices"] == second.body["choices"]
    count = first.usage["prompt_tokens"] - 1
    own = [answer.body["choices"][0]["logprobs"]["token_logprobs"][:count] for answer in (first, longer)]
    assert own[0] == own[1]
    assert streamed.text == first.text
    parts = [event["choices"][0]["logprobs"] for event in streamed.events if event["choices"][0]["logprobs"]]
    for name, whole in first.body["choices"][0]["logprobs"].items():
        assert [value for part in parts for value in part[name]] == whole


def test_b021_values_do_not_depend_on_order_cache_or_batch(server: Server) -> None:
    url = server.url + COMPLETIONS
    bodies = [scored(A + B), scored(A + C)]
    one_way = [values(answer) for answer in post_all(url, bodies, at_once=False)]
    other_way = [values(answer) for answer in post_all(url, bodies[::-1], at_once=False)][::-1]
    together = [values(answer) for answer in post_all(url, [*bodies, scored("x y z"), *bodies])]
    assert one_way == other_way == together[:2] == together[3:]
    shared = next(at for at, (one, other) in enumerate(zip(*one_way, strict=False)) if one != other)
    assert shared > 200, "the values of A are the same"


def test_b048_token_ids_are_echoed_as_text(server: Server) -> None:
    (answer,) = post_all(
        server.url + COMPLETIONS,
        [{"model": "smol", "prompt": "Hello there", "max_tokens": 1, "return_token_ids": True}],
    )
    ids = answer.body["choices"][0]["prompt_token_ids"]
    bodies = [{"model": "smol", "prompt": prompt, "echo": True, "max_tokens": 2} for prompt in (ids, [ids, ids[:1]])]
    one, two = post_all(server.url + COMPLETIONS, bodies)
    assert one.text.startswith("Hello there")
    assert [choice["text"].startswith("Hello") for choice in two.body["choices"]] == [True, True]


def test_choices_share_one_prompt_and_its_values(server: Server) -> None:
    """B036, B038: every choice tells of the prompt, also one that is ahead of the first."""
    body = scored(A + " Tell me.", n=4, temperature=1, max_tokens=3, seed=5, ignore_eos=True, echo=True, logprobs=0)
    (warm,) = post_all(server.url + COMPLETIONS, [{**body, "n": 1, "prompt_logprobs": None, "echo": False}])
    whole, streamed = post_all(server.url + COMPLETIONS, [body, {**body, "stream": True}])
    assert whole.usage["prompt_tokens"] == warm.usage["prompt_tokens"]
    assert whole.usage["completion_tokens"] == 12
    choices = whole.body["choices"]
    assert all(choice["prompt_logprobs"] == choices[0]["prompt_logprobs"] for choice in choices)
    for index, choice in enumerate(choices):
        mine = [event["choices"][0] for event in streamed.events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.slow
def test_b078_lists_are_complete_in_a_pool_too_small_for_all(model_path: Path, server: Server) -> None:
    bodies = [scored(A[: 200 + 40 * at], max_tokens=100, ignore_eos=True) for at in range(10)]
    expected = post_all(server.url + COMPLETIONS, bodies)
    with Server(model_path, *SMALL, "--kv-memory", "24MiB", "--max-model-len", "256") as small:
        got = post_all(small.url + COMPLETIONS, bodies)
        with urllib.request.urlopen(small.url + "/metrics", timeout=10) as response:
            metrics = response.read().decode()
    assert value(metrics, "tokenmill:num_preemptions_total") > 0
    for one, other in zip(expected, got, strict=True):
        assert values(one) == values(other)
        assert one.text == other.text


def test_b060_the_rendered_prompt_can_be_looked_at(server: Server) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        (answer,) = post_all(server.url + path, [body])
        assert answer.status == 200
        return answer.body

    messages = [{"role": "user", "content": "Hello there! 🌶"}]
    tokens = post("/tokenize", {"model": "smol", "messages": messages})
    rendered = post("/detokenize", {"model": "smol", "tokens": tokens["tokens"]})["prompt"]
    assert rendered.endswith("<|im_start|>user\nHello there! 🌶<|im_end|>\n<|im_start|>assistant\n")
    bare = post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert post("/detokenize", {"tokens": bare["tokens"]})["prompt"] == rendered.removesuffix("<|im_start|>assistant\n")
    ask = {"model": "smol", "messages": messages, "max_tokens": 1, "return_token_ids": True}
    answer = post("/v1/chat/completions", ask)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    strings = post("/tokenize", {"prompt": "a 🌶", "return_token_strs": True})
    assert len(strings["token_strs"]) == strings["count"]


def test_the_sdk_scores_and_tokenizes(server: Server) -> None:
    found = re.search(r"ZeroMQ clients: (\S+?)\)?$", server.stderr, re.MULTILINE)
    assert found is not None
    with Client(found[1], timeout=10) as client:
        tokenized = client.tokenize("The capital of France is Paris", return_token_strs=True)
        assert "".join(tokenized.token_strs) == "The capital of France is Paris"
        assert client.detokenize(tokenized.token_ids) == "The capital of France is Paris"
        score = client.score(tokenized.token_ids, top=3)
        assert score.token_ids == tokenized.token_ids
        assert tuple(position.chosen.token_id for position in score.positions) == tokenized.token_ids[1:]
        assert score.positions[-1].chosen.token == " Paris"
        assert score.positions[-1].rank < 10
        with pytest.raises(BadRequest, match="tokens"):
            client.detokenize([10**6])
        with pytest.raises(BadRequest, match="top must be"):
            client.score([1], top=21)


def test_allowed_ids_and_bad_words(server: Server) -> None:
    base = {
        "model": "smol",
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    (plain,) = post_all(server.url + COMPLETIONS, [base])
    first = plain.body["choices"][0]["token_ids"][0]
    word = plain.text.split()[0].strip(".,")
    bodies = [
        {**base, "allowed_token_ids": [500, 600, first]},
        {**base, "bad_words": [word]},
        {**base, "allowed_token_ids": [500, 600], "temperature": 1, "seed": 1, "min_tokens": 8, "bad_words": ["x"]},
    ]
    allowed, banned, drawn = post_all(server.url + COMPLETIONS, bodies)
    assert allowed.body["choices"][0]["token_ids"][0] == first
    assert set(allowed.body["choices"][0]["token_ids"]) <= {500, 600, first}
    assert word not in banned.text
    assert set(drawn.body["choices"][0]["token_ids"]) <= {500, 600}


def test_b034_penalties_do_not_depend_on_the_batch(server: Server) -> None:
    prompt = "Once upon a time there was a time when"
    first = {"model": "smol", "prompt": prompt, "temperature": 0, "repetition_penalty": 2, "max_tokens": 5}
    second = {"model": "smol", "prompt": prompt, "seed": 99, "top_k": 1, "max_tokens": 4, "temperature": 1}
    url = server.url + COMPLETIONS
    alone = [answer.text for answer in post_all(url, [first, second], at_once=False)]
    for _ in range(5):
        assert [answer.text for answer in post_all(url, [first, second])] == alone
        assert [answer.text for answer in post_all(url, [second, first])] == alone[::-1]


def test_the_start_says_what_requests_get_that_do_not_say(server: Server) -> None:
    assert "sampling defaults: OpenAI's" in server.stderr


@pytest.mark.slow
def test_ranks_together_give_the_values_of_one(model_path: Path, server: Server) -> None:
    """Each rank has a third of the vocabulary; a prompt longer than a chunk, and than the rows computed at once."""
    body = scored(A, prompt_logprobs=3)
    (alone,) = post_all(server.url + COMPLETIONS, [body])
    with Server(model_path, *SMALL, "--tp", "3") as three:
        (together, again) = post_all(three.url + COMPLETIONS, [body, body])
    assert values(together) == values(again)
    assert len(values(together)) == len(values(alone)) > 200
    differences = [abs(one - other) for one, other in zip(values(alone), values(together), strict=True)]
    assert max(differences) < 1.0
    assert mean(differences) < 0.1


@pytest.mark.slow
def test_b026_a_thousand_tokens_after_a_prompt_of_a_thousand(server: Server) -> None:
    prompt = [300 + at % 50 for at in range(1024)]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 1024, "min_tokens": 1024, "ignore_eos": True}
    (answer,) = post_all(server.url + COMPLETIONS, [body])
    assert answer.usage["completion_tokens"] == 1024
    assert answer.finish_reason == "length"


@pytest.mark.slow
def test_streamed_and_whole_are_equal_for_stops_cut_from_the_reference_outputs(
    server: Server, shared_dir: Path
) -> None:
    """40 prompts, stop strings of 4 characters cut from their own outputs; every offset is in the tokenizer's test."""
    url = server.url + COMPLETIONS
    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()]
    bodies = [
        {"model": "smol", "prompt": row["prompt_ids"], "max_tokens": len(row["output_ids"]), "temperature": 0}
        for row in rows
    ]
    texts = [answer.text for answer in post_all(url, bodies)]
    asked, expected = [], []
    for number, (body, text) in enumerate(zip(bodies, texts, strict=True)):
        for at in range(number % 8, max(0, len(text) - 4), 8):
            stop = text[at : at + 4]
            asked.append({**body, "stop": [stop]})
            expected.append(text[: text.find(stop)])
    assert len(asked) > 300
    for start in range(0, len(asked), 64):
        some = asked[start : start + 64]
        whole = post_all(url, some)
        streamed = post_all(url, [{**body, "stream": True} for body in some])
        for one, other, wanted in zip(whole, streamed, expected[start : start + 64], strict=True):
            assert one.text == other.text == wanted
            assert one.finish_reason == other.finish_reason == "stop"
