"""Issue 5, must show 5: stop strings cut from the reference prompts' own outputs at every offset, over HTTP.

What is sent grows with the square of an output, so a request begins at the last block of the prefix cache before its
stop: the tokens before that are part of its prompt. Greedy tokens are the same from there on, which this checks too.

`pytest -s -m slow tests/e2e/test_stop_offsets.py` prints the counts.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import Server
from tests.e2e.sse import Answer, client_session, post, post_all
from tokenizer_proc.vocabulary import Vocabulary, load_vocabulary

COMPLETIONS = "/v1/completions"
LENGTH = 4  # characters of a stop, fewer at the end of an output
BLOCK = 16  # of the prefix cache: `--block-size`
IN_FLIGHT = 64


@dataclass
class Output:
    """What a prompt of the reference gives, and which characters are whole after each of its tokens."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    ends: list[int]  # characters of the text that are complete with so many tokens, from 0 tokens on
    whole: list[bool]  # the tokens so far end with a whole character

    def first_token(self, at: int) -> int:
        """How many tokens of the output go into the prompt of a request whose stop is at character `at`."""
        starts = [
            count
            for count in range(len(self.token_ids))
            if self.ends[count] <= at and self.whole[count] and (len(self.prompt_ids) + count) % BLOCK == 1
        ]
        return starts[-1] if starts else 0

    def tokens_to(self, end: int) -> int:
        """Tokens that complete the first `end` characters."""
        return next((count for count, characters in enumerate(self.ends) if characters >= end), len(self.token_ids))


def output_of(prompt_ids: list[int], answer: Answer, vocabulary: Vocabulary) -> Output:
    token_ids = answer.body["choices"][0]["token_ids"]
    data, ends, whole = b"", [0], [True]
    for token_id in token_ids:
        data += b"" if token_id in vocabulary.special_ids else vocabulary.token_bytes(token_id)
        ends.append(len(data.decode("utf-8", "ignore")))
        whole.append(data.decode("utf-8", "ignore").encode() == data)
    assert data.decode("utf-8", "replace") == answer.text
    return Output(prompt_ids, token_ids, answer.text, ends, whole)


@dataclass
class Case:
    """A request with a stop string, and what it must give."""

    body: dict[str, Any]
    expected: str


def cases_of(output: Output) -> Iterator[Case]:
    """One for each different stop: equal strings make the same request, wherever they were cut from."""
    text = output.text
    for stop in dict.fromkeys(text[at : at + LENGTH] for at in range(len(text))):
        at = text.find(stop)
        first = output.first_token(at)
        last = min(output.tokens_to(at + len(stop)) + 1, len(output.token_ids))
        body = {
            "model": "smol",
            "prompt": output.prompt_ids + output.token_ids[:first],
            "max_tokens": last - first,
            "temperature": 0,
            "stop": [stop],
        }
        yield Case(body, text[output.ends[first] : at])


async def check(session: aiohttp.ClientSession, url: str, cases: Iterator[Case]) -> tuple[int, int]:
    """Ask all of them, whole and streamed; how many there were, and how many tokens it took."""
    asked = tokens = 0

    async def ask() -> None:
        nonlocal asked, tokens
        for case in cases:
            whole = await post(session, url, case.body)
            streamed = await post(
                session, url, {**case.body, "stream": True, "stream_options": {"include_usage": True}}
            )
            assert streamed.done, (case, streamed)
            for answer in (whole, streamed):
                assert (answer.text, answer.finish_reason) == (case.expected, "stop"), case
                tokens += answer.usage["completion_tokens"]
            asked += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(ask())
    return asked, tokens


@pytest.mark.slow
def test_b001_b002_b003_streamed_and_whole_are_equal_for_a_stop_at_every_offset(
    model_path: Path, shared_dir: Path
) -> None:
    vocabulary = load_vocabulary(model_path)
    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()]
    assert len(rows) == 40
    began = time.monotonic()
    flags = ("--served-model-name", "smol", "--dtype", "float32", "--kv-memory", "1GiB", "--block-size", str(BLOCK))
    with Server(model_path, *flags) as server:
        url = server.url + COMPLETIONS
        bodies = [
            {
                "model": "smol",
                "prompt": row["prompt_ids"],
                "max_tokens": len(row["output_ids"]),
                "temperature": 0,
                "return_token_ids": True,
            }
            for row in rows
        ]
        outputs = [
            output_of(row["prompt_ids"], answer, vocabulary)
            for row, answer in zip(rows, post_all(url, bodies), strict=True)
        ]

        async def check_all() -> tuple[int, int]:
            cases = (case for output in outputs for case in cases_of(output))
            async with client_session() as session:
                return await check(session, url, cases)

        asked, tokens = asyncio.run(check_all())
    offsets = sum(len(output.text) for output in outputs)
    cut = [(output, at) for output in outputs for at in range(len(output.text))]
    inside_tokens = sum(at not in output.ends for output, at in cut)
    beyond_ascii = sum(not output.text[at : at + LENGTH].isascii() for output, at in cut)
    of_several_tokens = sum(
        any(not output.whole[count] and at <= output.ends[count] < at + LENGTH for count in range(len(output.whole)))
        for output, at in cut
    )
    print(
        f"\n{offsets} offsets ({inside_tokens} inside a token, {of_several_tokens} with a character of several tokens, "
        f"{beyond_ascii} beyond ASCII), {asked} different stops, each whole and streamed, {tokens} tokens, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert offsets > 6000
    assert inside_tokens > 3000
    assert of_several_tokens > 50
    assert beyond_ascii > 100
    assert asked > 4000
