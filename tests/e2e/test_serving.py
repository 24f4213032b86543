"""The main job on the real model: mixed loads, prefix reuse, what is left at idle."""

import asyncio
import json
import platform
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launch import time_slice
from tests.e2e.server import Server
from tests.e2e.sse import client_session, post, post_all
from tests.exposition import value

WORDS = ["river", "stone", "light", "under", "follow", "seven", "garden", "quiet", "market", "window", "letter"]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        return value(response.read().decode(), f"tokenmill:{name}")


def text_of_words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def blocks_at_idle(server: Server) -> dict[str, int]:
    """Block counts once nothing runs; fails when that takes more than ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        progress = get(server.url + "/health/progress")
        blocks = progress["kv_blocks"]
        if progress["running"] == 0 and progress["waiting"] == 0 and blocks["in_transit"] == 0:
            return blocks
        assert time.monotonic() < deadline, progress
        time.sleep(0.1)


def test_the_capital_of_france(server: Server) -> None:
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    (answer,) = post_all(server.url + "/v1/chat/completions", [body])
    assert "Paris" in answer.text
    assert answer.done


def test_only_ranks_have_the_usual_time_slice(server: Server) -> None:
    """Who waits for messages goes before who computes, as the kernel says itself."""
    if sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("this system has no time slices to ask for: Linux has since 6.12")
    slices: dict[str, list[int]] = {}
    for role, process in server.roles().items():
        for file in Path(f"/proc/{process.pid}/task").glob("*/sched"):
            lines = [line for line in file.read_text().splitlines() if line.startswith("se.slice")]
            slices.setdefault(role.split("-")[0], []).extend(int(line.split(":")[1]) for line in lines)
    if not slices:
        pytest.skip("this kernel does not tell (no CONFIG_SCHED_DEBUG)")
    asked = round(1e9 * time_slice.SECONDS)
    for role in ("frontend", "tokenizer", "scheduler"):  # the thread that waits for the launcher's end comes before
        assert sorted(slices[role])[:-1] == [asked] * (len(slices[role]) - 1), role
    assert min(slices["worker"]) > asked


def test_a_short_request_overtakes_32_streams(server: Server) -> None:
    async def main() -> None:
        rng = random.Random(5)
        async with client_session() as session:
            url = server.url + "/v1/completions"
            streams = [
                asyncio.create_task(
                    post(
                        session,
                        url,
                        {
                            "model": "smol",
                            "prompt": text_of_words(seed, rng.randint(5, 120)),
                            "max_tokens": rng.randint(40, 90),
                            "temperature": 0,
                            "ignore_eos": True,
                            "stream": True,
                        },
                    )
                )
                for seed in range(32)
            ]
            await asyncio.sleep(1.0)
            short = await post(session, url, {"model": "smol", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
            still_running = sum(not stream.done() for stream in streams)
            answers = await asyncio.gather(*streams)
        assert short.usage["completion_tokens"] == 4
        assert still_running >= 24, "the short one ends long before the others"
        assert all(answer.done and answer.finish_reason == "length" for answer in answers)

    asyncio.run(main())
    blocks = blocks_at_idle(server)
    assert blocks["private"] == 0
    assert blocks["free"] + blocks["cached"] == blocks["total"]


def test_the_second_of_two_equal_prompts_comes_from_the_cache(server: Server) -> None:
    prompt = [100 + (i * 7919) % 40000 for i in range(1000)]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    first, second = post_all(server.url + "/v1/completions", [body, body], at_once=False)
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert 1000 - 16 <= second.usage["prompt_tokens_details"]["cached_tokens"] < 1000
    assert first.text == second.text


def test_a_seed_gives_the_same_tokens_alone_and_in_company(server: Server) -> None:
    body = {"model": "smol", "prompt": "The weather today", "max_tokens": 24, "temperature": 1.0, "seed": 7}
    others = [{**body, "seed": seed, "prompt": text_of_words(seed, seed)} for seed in range(20, 35)]
    url = server.url + "/v1/completions"
    alone = post_all(url, [body])[0]
    together = post_all(url, [*others[:7], body, *others[7:]])[7]
    assert alone.text == together.text
    different = post_all(url, [{**body, "seed": 8}])[0]
    assert different.text != alone.text


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    async def main() -> None:
        async with client_session() as session:
            body = {"model": "smol", "prompt": "Tell me", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            async with session.post(server.url + "/v1/completions", json=body) as response:
                await response.content.readline()

    before = metric(server, "requests_aborted_total")
    asyncio.run(main())
    # The counters come some times a second: at first they may still be those from before the request.
    deadline = time.monotonic() + 10
    while metric(server, "requests_aborted_total") == before:
        assert time.monotonic() < deadline, "the abort was not counted"
        time.sleep(0.05)
    assert blocks_at_idle(server)["private"] == 0
    assert metric(server, "requests_aborted_total") == before + 1


def test_stop_strings_end_a_request_early_for_the_scheduler_too(server: Server) -> None:
    """B001: the stop stands inside a token."""
    body = {
        "model": "smol",
        "prompt": "Here is the English alphabet: ABC",
        "temperature": 0,
        "max_tokens": 40,
        "stop": ["DE"],
    }
    plain, streamed, unstopped = post_all(
        server.url + "/v1/completions", [body, {**body, "stream": True}, {**body, "stop": None}]
    )
    assert "DE" in unstopped.text
    assert plain.text == streamed.text == unstopped.text.split("DE")[0]
    assert plain.finish_reason == streamed.finish_reason == "stop"
    assert plain.usage["completion_tokens"] < 40


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(server: Server, temperature: float) -> None:
    """B029."""
    body = {
        "model": "smol",
        "prompt": "One two three",
        "max_tokens": 30,
        "ignore_eos": True,
        "temperature": temperature,
    }
    tiny, greedy = post_all(server.url + "/v1/completions", [body, {**body, "temperature": 0}])
    assert tiny.text == greedy.text
    assert tiny.usage["completion_tokens"] == 30


def test_presence_penalty_leaves_the_prompt_alone_and_repetition_penalty_does_not(server: Server) -> None:
    """B035."""
    base = {"model": "smol", "prompt": "Paris, Paris, Paris,", "max_tokens": 1, "temperature": 0, "logprobs": 20}
    plain, presence, repetition = (
        answer.body["choices"][0]["logprobs"]["top_logprobs"][0]
        for answer in post_all(
            server.url + "/v1/completions",
            [base, {**base, "presence_penalty": 2}, {**base, "repetition_penalty": 1.5}],
        )
    )
    assert presence == plain
    assert repetition.get(" Paris", -99.0) < plain[" Paris"]


def test_logit_bias_bans_and_forces(server: Server) -> None:
    """B031."""
    base = {
        "model": "smol",
        "prompt": "The capital of France is",
        "max_tokens": 3,
        "temperature": 0,
        "return_token_ids": True,
    }
    url = server.url + "/v1/completions"
    plain = post_all(url, [base])[0].body["choices"][0]["token_ids"]
    banned, forced = post_all(
        url, [{**base, "logit_bias": {str(plain[0]): -100}}, {**base, "logit_bias": {"1000": 100}}]
    )
    assert plain[0] not in banned.body["choices"][0]["token_ids"]
    assert forced.body["choices"][0]["token_ids"] == [1000] * 3


def test_min_tokens_and_ignore_eos_count_outputs_only(server: Server) -> None:
    """B026, B028."""
    prompt = [300 + i % 50 for i in range(256)]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 64, "min_tokens": 64, "ignore_eos": True}
    (answer,) = post_all(server.url + "/v1/completions", [body])
    assert answer.usage["completion_tokens"] == 64
    assert answer.finish_reason == "length"


@pytest.mark.slow  # test_identity has a preempted request too
def test_preempted_requests_give_the_same_text_as_with_room(model_path: Path, server: Server) -> None:
    """B078: 12 requests of up to 160 tokens in a pool that holds three of them, greedy and seeded with penalties."""
    bodies = [
        {
            "model": "smol",
            "prompt": text_of_words(seed, 12),
            "max_tokens": 120,
            "ignore_eos": True,
            "logprobs": 1,
            **({"temperature": 0} if seed % 2 else {"temperature": 1, "seed": seed, "frequency_penalty": 0.5}),
        }
        for seed in range(12)
    ]
    expected = post_all(server.url + "/v1/completions", bodies)
    flags = ("--kv-memory", "24MiB", "--max-model-len", "256", "--dtype", "float32", "--served-model-name", "smol")
    with Server(model_path, *flags) as small:
        got = post_all(small.url + "/v1/completions", bodies)
        assert metric(small, "num_preemptions_total") > 0
    for one, other in zip(expected, got, strict=True):
        assert one.body["choices"] == other.body["choices"]
        assert one.usage["completion_tokens"] == other.usage["completion_tokens"] == 120


def test_several_frontends_and_tokenizers_serve_as_one(model_path: Path) -> None:
    flags = ("--frontends", "2", "--tokenizers", "2", "--kv-memory", "64MiB", "--max-model-len", "512")
    body = {"prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    with Server(model_path, *flags, "--served-model-name", "a,b") as server:
        answers = post_all(server.url + "/v1/completions", [{**body, "model": "ab"[i % 2]} for i in range(20)])
        assert len({answer.text for answer in answers}) == 1
        # Whichever frontend answers speaks for both.
        with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        assert value(text, "tokenmill:request_success_total", finished_reason="length") == 20
        assert value(text, "tokenmill:http_requests_total", route="/v1/completions", status="200") == 20
