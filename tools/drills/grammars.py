"""What a grammar costs: the time per token and the tokens a second with and without one."""

import asyncio
import json
import statistics
import sys
import time
from argparse import Namespace
from typing import Any

import aiohttp

from tools.drills.server import Reply, complete, http, server
from tools.reports.table import render

HELP = """\
Start a server and let so many clients stream completions of one length, in turns without a grammar, with a regular
expression, and with a JSON schema, none of which may end before that length. Each number is the median of the rounds.
"""

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"city": {"type": "string"}}}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
_KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "regex": {"guided_regex": "([A-Z][a-z, ]+[.] )+"},
    "json_schema": {"guided_json": json.dumps({"type": "array", "items": _PERSON, "minItems": 1000})},
}


async def run(options: Namespace) -> None:
    """Print one line for each kind and number of streams."""
    rows = []
    async with server(options.model) as url, http() as session:
        for streams in options.streams:
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
            await asyncio.gather(*[_round(session, url, kind, 1, 8) for kind in _KINDS])  # compiles the grammars
            for number in range(options.rounds):
                for kind in _KINDS:
                    print(f"  {streams} streams, round {number + 1}: {kind}", file=sys.stderr)
                    found[kind].append(await _round(session, url, kind, streams, options.output_tokens))
            medians = {kind: [statistics.median(column) for column in zip(*found[kind], strict=True)] for kind in found}
            for kind, (rate, per_token) in medians.items():
                ratio = rate / medians["free"][0]
                name = f"{streams} stream{'s' if streams > 1 else ''}, {kind}"
                rows.append((name, [f"{rate:.1f}", f"{1e3 * per_token:.2f}", f"{ratio:.3f}"]))
    print(f"{options.output_tokens} output tokens, {options.rounds} rounds")
    print(render(["tok/s", "ms/token", "of free"], rows))


async def _round(
    session: aiohttp.ClientSession, url: str, kind: str, streams: int, output_tokens: int
) -> tuple[float, float]:
    """Output tokens a second of all streams, prompts included, and the mean of their times per token in seconds."""
    begin = time.perf_counter()
    replies = await asyncio.gather(
        *[
            complete(
                session,
                url,
                f"List number {index}:",
                output_tokens,
                **_KINDS[kind],
                min_tokens=output_tokens,
                temperature=1,
                seed=index,
            )
            for index in range(streams)
        ]
    )
    seconds = time.perf_counter() - begin
    _require_whole(replies, output_tokens)
    return streams * output_tokens / seconds, statistics.mean(reply.tpot for reply in replies)


def _require_whole(replies: list[Reply], output_tokens: int) -> None:
    for reply in replies:
        if len(reply.token_ids) != output_tokens:
            raise SystemExit(f"a request failed: {reply.status} {reply.error or 'too few tokens'}")
