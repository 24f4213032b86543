"""Timelines of real requests: what must come after what, what adds up, and that a trace of them says the same."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from ipc import Client
from ipc.messages import SamplingParams
from ipc.timing_columns import chunks_of
from tests.chrome_trace import Checked, Span, check
from tests.e2e.server import SMALL, Server
from tests.e2e.sse import Answer, client_session, post
from tools.trace import main as trace

CHUNK = 32  # prompt tokens in a step
LONG = "The quick brown fox jumps over the lazy dog, and then it goes on and on. " * 8


@pytest.fixture(scope="module")
def small_server(model_path: Path) -> Iterator[Server]:
    """Its pool holds about 700 tokens, so that some requests are preempted."""
    flags = ("--kv-memory", "16MiB", "--max-model-len", "600", "--prefill-chunk", str(CHUNK), "--max-step-tokens", "64")
    with Server(model_path, *SMALL, *flags) as running:
        yield running


def ask(server: Server, *requests: tuple[str, dict[str, Any]], path: str = "/v1/completions") -> list[Answer]:
    """All of them at once, each under its name and with the header."""

    async def main() -> list[Answer]:
        async with client_session() as session:
            headers = [{"x-request-id": name, "x-tokenmill-timings": "1"} for name, _ in requests]
            bodies = [{"model": "smol", "temperature": 0, "ignore_eos": True, **body} for _, body in requests]
            url = server.url + path
            return await asyncio.gather(*map(post, [session] * len(bodies), [url] * len(bodies), bodies, headers))

    return asyncio.run(main())


def timings_of(answer: Answer) -> dict[str, Any]:
    """Exactly one in an answer."""
    found = [part["timings"] for part in ([answer.body] if answer.body else answer.events) if "timings" in part]
    assert len(found) == 1, answer
    assert isinstance(found[0], dict)
    return found[0]


def record(server: Server, name: str) -> dict[str, Any]:
    with urlopen(f"{server.url}/debug/requests/{quote(name, safe='')}", timeout=10) as response:
        found = json.load(response)
    assert isinstance(found, dict)
    return found


def check_timings(timings: dict[str, Any]) -> None:
    """The order of times, and what adds up; exactly so for who was never preempted."""
    for choice in timings["choices"]:
        chunks = choice["prefill_chunks"]
        names = ("queued", "first_scheduled", "first_token", "last_token", "finished")
        queued, scheduled, first, last, finished = (choice[f"{name}_ms"] for name in names)
        assert 0 <= timings["tokenized_ms"] <= queued <= scheduled < chunks[0][1] <= first <= last <= finished
        assert chunks[0][0] == scheduled
        assert all(start < end for start, end, _ in chunks)
        assert [end for _, end, _ in chunks] == sorted(end for _, end, _ in chunks)
        computed = sum(tokens for _, _, tokens in chunks)
        uncached = choice["prompt_tokens"] - choice["cached_tokens"]
        if choice["preemptions"] == 0:
            assert computed == uncached
            assert chunks[-1][1] == first
            assert choice["steps"] == len(chunks) + choice["completion_tokens"] - 1
        else:
            assert first in [end for _, end, _ in chunks]


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_is_computed_in_chunks_and_found_in_the_cache_the_next_time(
    small_server: Server, stream: bool
) -> None:
    body = {"prompt": f"{stream} {LONG}", "max_tokens": 8, "stream": stream}
    [first] = ask(small_server, (f"first-{stream}", body))
    [second] = ask(small_server, (f"second-{stream}", body))
    for answer in (first, second):
        check_timings(timings_of(answer))
    [cold], [warm] = timings_of(first)["choices"], timings_of(second)["choices"]
    assert len(cold["prefill_chunks"]) == -(-cold["prompt_tokens"] // CHUNK) > 3
    assert cold["cached_tokens"] == 0 < warm["cached_tokens"]
    assert len(warm["prefill_chunks"]) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_times_lie_between_what_the_client_sees(small_server: Server, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
    sent = time.time(), time.perf_counter()
    [answer] = ask(small_server, (f"seen-{len(path)}", {**prompt, "max_tokens": 6, "stream": True}), path=path)
    timings = timings_of(answer)
    check_timings(timings)
    seen = sent[0] + answer.arrivals[0] - sent[1]
    [choice] = timings["choices"]
    margin = 0.01  # between two readings of clocks
    assert sent[0] - margin <= timings["arrival"]
    assert timings["arrival"] + choice["first_token_ms"] / 1e3 <= seen + margin
    assert timings["arrival"] + choice["finished_ms"] / 1e3 <= time.time() + margin


def test_choices_have_timelines_of_their_own(small_server: Server) -> None:
    [answer] = ask(small_server, ("three", {"prompt": LONG + "three", "max_tokens": 5, "n": 3, "temperature": 1}))
    timings = timings_of(answer)
    check_timings(timings)
    assert [choice["index"] for choice in timings["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_timeline_that_adds_up(small_server: Server, stream: bool) -> None:
    """The scheduler does not know of it: its part came with the first token."""
    body = {"prompt": LONG + "The quick brown fox", "max_tokens": 30}
    text = ask(small_server, ("whole", body))[0].text
    stop = text.split()[2]
    [answer] = ask(small_server, (f"stopped-{stream}", {**body, "stop": stop, "stream": stream}))
    assert answer.finish_reason == "stop"
    timings = timings_of(answer)
    check_timings(timings)
    assert 1 < timings["choices"][0]["completion_tokens"] < 30
    assert timings["choices"][0]["cached_tokens"] > 0, "the usage's, too, is known with the first token"


def test_preempted_requests(small_server: Server) -> None:
    body = {"max_tokens": 180, "stream": True}
    stops = {"stop": ["no output has this"]}
    requests = [(f"many-{at}", {**body, **(stops if at % 2 else {}), "prompt": f"{at} tales"}) for at in range(7)]
    answers = ask(small_server, *requests)
    choices = []
    for answer in answers:
        check_timings(timings_of(answer))
        choices += timings_of(answer)["choices"]
    assert [choice["completion_tokens"] for choice in choices] == [180] * 7
    preempted = [choice for choice in choices if choice["preemptions"]]
    assert preempted
    assert all(choice["steps"] >= 180 for choice in preempted)
    assert any(choice["prefill_chunks"][-1][1] > choice["first_token_ms"] for choice in preempted)


def test_the_end_of_every_request_is_kept(small_server: Server) -> None:
    [finished] = ask(small_server, ("kept", {"prompt": "Hello", "max_tokens": 3, "stream": True}))
    found = record(small_server, "kept")
    assert {name: found[name] for name in timings_of(finished)} == timings_of(finished)
    assert found["status"] == "finished"
    assert found["first_output_ms"] <= found["ended_ms"]
    assert found["choices"][0]["finished_ms"] <= found["ended_ms"]

    [refused] = ask(small_server, ("refused", {"prompt": LONG * 5, "max_tokens": 3}))
    assert refused.status == 400
    found = record(small_server, "refused")
    assert (found["status"], found["error"]["status"], found["choices"]) == ("failed", 400, [])

    async def leave() -> None:
        async with client_session() as session:
            body = {"model": "smol", "prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
            url, headers = small_server.url + "/v1/completions", {"x-request-id": "left"}
            async with session.post(url, json=body, headers=headers) as response:
                await response.content.readline()

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while True:
        try:
            found = record(small_server, "left")
            break
        except HTTPError:
            assert time.monotonic() < deadline, "it is not kept"
            time.sleep(0.02)
    assert (found["status"], found["error"], found["choices"]) == ("aborted", None, [])
    assert found["first_output_ms"] <= found["ended_ms"]


def test_clients_of_the_sdk_get_them_with_every_end(endpoint: str) -> None:
    with Client(endpoint) as client:
        for params in (SamplingParams(max_tokens=5, n=2), SamplingParams(max_tokens=40, temperature=0, stop=("e",))):
            before = time.monotonic()
            answer = client.generate("Once upon a time", params)
            assert len(answer.choices) == params.n
            for choice in answer.choices:
                timings = choice.timings
                assert timings is not None
                told = timings.scheduler
                times = [before, timings.received, timings.tokenized, told.queued, told.first_scheduled]
                times += [told.first_token, told.last_token, timings.finished, time.monotonic()]
                assert times == sorted(times)
                computed = sum(tokens for _, _, tokens in chunks_of(told))
                assert computed == answer.usage.prompt_tokens - choice.cached_tokens


def traced(server: Server, file: Path, seconds: int) -> tuple[Checked, list[dict[str, Any]]]:
    """A trace that was taken by the tool while requests ran, and the records of those."""
    names = [f"traced-{seconds}-{at}" for at in range(3)]

    async def main() -> int:
        options = ["--url", server.url, "--seconds", str(seconds), "--out", str(file)]
        tracing = asyncio.create_task(asyncio.to_thread(trace, options))
        await asyncio.sleep(seconds / 4)
        requests = [(name, {"prompt": f"{name} {LONG}", "max_tokens": 6, "stop": "#"}) for name in names]
        await asyncio.to_thread(ask, server, *requests)
        return await tracing

    assert asyncio.run(main()) == 0
    return check(file.read_bytes()), [record(server, name) for name in names]


def test_a_trace_shows_what_all_processes_did(small_server: Server, tmp_path: Path) -> None:
    """It agrees with what is kept of the requests."""
    for seconds in (2, 4, 8, 16, 32):  # a busy machine does not get the requests done in the first one
        found, kept = traced(small_server, tmp_path / "trace.json", seconds)
        shown = {span.name: span for span in found.overlapping.get("request", ())}
        if len(shown) == 3:
            break
    assert found.other["lost"] == 0
    for one in kept:
        check_agreement(shown[f"{one['request_id']} [0]"], one, found.other["unix_seconds_of_ts_0"])
    assert len(found.overlapping["http"]) == len(found.overlapping["encode"]) == 3
    assert [name for _, name, _ in found.instants] == ["first byte"] * 3
    steps = found.tracks["worker-0"]
    numbers = [int(span.name.removeprefix("step ")) for span in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert all("forward" in [part.name for part in span.inner] for span in steps)
    planned = {name: args for span in found.tracks["scheduler-0"] for name, args in span.args.items()}
    # Processes hear at slightly different moments that somebody listens.
    heard = min(int(name.removeprefix("step ")) for name in planned)
    assert {f"step {number}" for number in numbers if number >= heard} <= set(planned)
    prompts = sum(one["choices"][0]["prompt_tokens"] - one["choices"][0]["cached_tokens"] for one in kept)
    assert sum(args["tokens"] for args in planned.values()) >= prompts + 3 * 5
    chunks = sum(len(one["choices"][0]["prefill_chunks"]) for one in kept)
    assert sum(args["prefill_rows"] for args in planned.values()) == chunks
    assert sum(args["decode_rows"] for args in planned.values()) >= 3 * 5
    assert sum(span.args["tokens"] for span in found.tracks["tokenizer-0"]) >= 3 * 6


def check_agreement(span: Span, kept: dict[str, Any], origin: float) -> None:
    """The spans of a request's track against its record."""
    [choice] = kept["choices"]
    start = (kept["arrival"] - origin) * 1e6

    def at(milliseconds: float) -> object:
        return pytest.approx(start + milliseconds * 1e3, abs=2)

    by_name = {inner.name: inner for inner in span.inner}
    assert span.start == at(0)
    assert span.end == at(choice["finished_ms"])
    assert by_name["tokenize"].end == at(kept["tokenized_ms"])
    assert (by_name["queue"].start, by_name["queue"].end) == (at(choice["queued_ms"]), at(choice["first_scheduled_ms"]))
    decode = by_name["decode"]
    assert (decode.start, decode.end) == (at(choice["first_token_ms"]), at(choice["last_token_ms"]))
    prefills = [inner for inner in span.all() if inner.name == "prefill"]
    assert [inner.end for inner in prefills] == [at(end) for _, end, _ in choice["prefill_chunks"]]
    assert [inner.args["tokens"] for inner in prefills] == [tokens for _, _, tokens in choice["prefill_chunks"]]
