"""Streams that decode while a long prompt arrives: how long do they stall, and what does that cost the prompt?"""

import asyncio
import contextlib
import itertools
import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

from tools.drills.progress import Progress
from tools.drills.server import Reply, complete, http, server

_REPEATS_AT_ONCE = 5  # of each arm in turn: a machine that is faster for a while is so for all of them


async def run(options: Namespace) -> None:
    """Print the longest gap and the prompt's TTFT with chunking off, and with each of `options.max_itl_ms`."""
    off = ("--max-step-tokens", str(max(options.prompt_tokens + options.streams, 512)))
    arms: list[tuple[str, Sequence[str]]] = [("chunking off", off), ("defaults", ())]
    arms += [(f"--max-itl-ms {limit:g}", ("--max-itl-ms", f"{limit:g}")) for limit in dict.fromkeys(options.max_itl_ms)]
    results = {name: _Result([], [], []) for name, _ in arms}
    try:
        for first in range(0, options.repeats, _REPEATS_AT_ONCE):
            repeats = min(_REPEATS_AT_ONCE, options.repeats - first)
            for name, flags in arms:
                async with server(options.model, "--max-seqs", "16", *flags) as url, http() as session:
                    title = f"{name}, {first + 1} to {first + repeats} of {options.repeats}"
                    await _measure(session, url, options, title, random.Random(first), repeats, results[name])
    finally:
        _print_table(options, results)


def _print_table(options: Namespace, results: "dict[str, _Result]") -> None:
    print(
        f"{options.streams} streams, a prompt of {options.prompt_tokens} tokens, {options.repeats} repeats; "
        "milliseconds"
    )
    print(f"{'':20} {'gap without':>12} {'longest gap':>22} {'TTFT of the prompt':>20}")
    print(f"{'':20} {'median':>12} {'median':>11} {'worst':>10} {'median':>10} {'ratio':>9}")
    base_ttft = 0.0
    for name, (quiet, gaps, ttfts) in results.items():
        if not ttfts:
            continue  # it was ended before
        ttft = statistics.median(ttfts)
        base_ttft = base_ttft or ttft
        print(
            f"{name:20} {statistics.median(quiet) * 1e3:12.0f} {statistics.median(gaps) * 1e3:11.0f} "
            f"{max(gaps) * 1e3:10.0f} {ttft * 1e3:10.0f} {ttft / base_ttft:9.2f}  ({len(ttfts)} repeats)"
        )


class _Result(NamedTuple):
    """Seconds: longest gap of each undisturbed stream; longest gap and TTFT of each repeat."""

    quiet: list[float]
    gaps: list[float]
    ttfts: list[float]


def _opening(index: int) -> str:
    """The beginning of a text in plain letters: each token of what follows is text at once.

    Of random tokens follow random bytes, and a byte that is not a whole character yet is held back.
    """
    name = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")[index % 8]
    return f"{name}, who was {20 + index} years old, lived in a small house by the sea. Every morning"


async def _measure(
    session: aiohttp.ClientSession,
    url: str,
    options: Namespace,
    title: str,
    rng: random.Random,
    repeats: int,
    result: _Result,
) -> None:
    """Add `repeats` repeats to `result`."""
    together = 0
    with Progress(title, repeats) as progress:
        for _ in range(repeats):
            replies = [Reply(0.0) for _ in range(options.streams)]
            tasks = [
                asyncio.create_task(complete(session, url, _opening(index), 4000, reply))
                for index, reply in enumerate(replies)
            ]
            while not all(len(reply.times) >= 12 for reply in replies):
                if any(task.done() for task in tasks):
                    raise SystemExit(f"a stream ended early: {[reply.error for reply in replies]}")
                await asyncio.sleep(0.01)
            result.quiet.extend(_longest_gap(reply.times[4:], 0.0, float("inf")) for reply in replies)
            prompt = [rng.randrange(100, 40000) for _ in range(options.prompt_tokens)]
            long = await complete(session, url, prompt, 1)
            if not long.finished:
                raise SystemExit(f"the long prompt failed: {long.status} {long.error}")
            await asyncio.sleep(0.3)  # the tokens of the step that ended it
            together += sum(before == after for reply in replies for before, after in itertools.pairwise(reply.times))
            result.gaps.append(max(_longest_gap(reply.times, long.sent, long.times[0]) for reply in replies))
            result.ttfts.append(long.ttft)
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.5)
            progress.step()
    if together:
        print(f"  {title}: {together} tokens came together with another, which lengthens gaps", file=sys.stderr)


def _longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """Longest time between two tokens of which some part lies between `start` and `end`."""
    pairs = itertools.pairwise(times)
    return max((after - before for before, after in pairs if after > start and before < end), default=0.0)
