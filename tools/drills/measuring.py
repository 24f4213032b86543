"""What all measuring costs: the throughput of a server that measures everything, beside one that measures nothing."""

import asyncio
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tools.drills.server import complete, http, server
from tools.reports.percentiles import mean_interval

HELP = """\
Each pair is two servers under the same closed loop of streams, in turns of some seconds: first the one, then twice the
other, and so on. Every turn is the same work for both: prompts that no cache has seen, and 64 tokens each as they come.

on    as the server comes, and with everything that can be asked of it: --record FILE, all requests with the header
      x-tokenmill-timings: 1, /metrics read every other turn, /diagnose every fourth (so about every 5 and 10 seconds
      of load)
off   --no-measure, and nobody asks for anything

Turns are short since a machine's speed drifts: what lasts longer than they do meets both alike. Each pair has servers
of its own: what one has by chance, such as where its memory lies, is then one pair's chance.

Throughput is output tokens by the time of all turns. The ratio of a pair is on / off. The interval is a bootstrap over
pairs, of the mean ratio. Clients and askers run on this machine too, and what their asking costs them counts as cost of
measuring.
"""

_PROMPT, _OUTPUTS = 20, 64  # tokens
_SCRAPE_TURNS, _DIAGNOSE_TURNS = 2, 4
_FLAGS = ("--kv-memory", "256MiB")  # enough, and allocated quickly


async def run(options: Namespace) -> None:
    """Print a line for each pair, and what they say together."""
    pairs: list[tuple[float, float]] = []
    print(f"{'pair':>4}  {'first':5}  {'off tok/s':>9}  {'on tok/s':>9}  {'on / off':>8}", flush=True)
    for on_first in order(options.pairs):
        off, on = await _pair(options, on_first)
        pairs.append((off, on))
        first = "on" if on_first else "off"
        print(f"{len(pairs):4}  {first:5}  {off:9.1f}  {on:9.1f}  {on / off:8.4f}", flush=True)
    print(conclusion([on / off for off, on in pairs]))


def order(pairs: int) -> list[bool]:
    """Of each pair, whether the run with measuring is the first: in half of them, in an order that is always the same.

    Of an odd number, once more often.
    """
    firsts = [index % 2 == 0 for index in range(pairs)]
    random.Random(0).shuffle(firsts)
    return firsts


def conclusion(ratios: Sequence[float]) -> str:
    """What the ratios on / off of all pairs say of the overhead, as a share of the throughput without measuring."""
    mean = statistics.fmean(ratios)
    ratio = mean_interval(np.array(ratios))
    assert ratio.low is not None
    assert ratio.high is not None
    return (
        f"on / off: mean {mean:.4f}, 95% interval {ratio.low:.4f} to {ratio.high:.4f}; median "
        f"{statistics.median(ratios):.4f}\n"
        f"measuring costs {1 - mean:.2%} of the throughput, 95% interval {1 - ratio.high:.2%} to {1 - ratio.low:.2%}"
    )


async def _pair(options: Namespace, on_first: bool) -> tuple[float, float]:
    """Tokens a second without measuring and with it."""
    seconds = {False: 0.0, True: 0.0}
    tokens = {False: 0, True: 0}
    with tempfile.TemporaryDirectory(prefix="tokenmill-drill-") as folder:
        record = ("--record", str(Path(folder) / "trace.jsonl"))
        async with (
            server(options.model, *_FLAGS, "--no-measure") as off,
            server(options.model, *_FLAGS, *record) as on,
            http() as plain,
            http(headers={"x-tokenmill-timings": "1"}) as timed,
        ):
            await asyncio.gather(*_streams(plain, off, options, -1))  # to warm up
            await asyncio.gather(*_streams(timed, on, options, -1))
            for turn in range(options.turns):
                for measured in (on_first, not on_first) if turn % 2 == 0 else (not on_first, on_first):
                    session, url = (timed, on) if measured else (plain, off)
                    asked = [_ask(timed, on, path) for path in asked_in(turn)] if measured else []
                    begun = time.perf_counter()
                    counts = await asyncio.gather(*_streams(session, url, options, turn), *asked)
                    seconds[measured] += time.perf_counter() - begun
                    tokens[measured] += sum(counts)
    return tokens[False] / seconds[False], tokens[True] / seconds[True]


def asked_in(turn: int) -> list[str]:
    """What is asked of the server with measuring, beside its streams."""
    paths = {"/metrics": _SCRAPE_TURNS, "/diagnose": _DIAGNOSE_TURNS}
    return [path for path, turns in paths.items() if turn % turns == 0]


def _streams(session: aiohttp.ClientSession, url: str, options: Namespace, turn: int) -> list[Coroutine[Any, Any, int]]:
    return [
        _stream(session, url, random.Random(f"{turn} {number}"), number, options) for number in range(options.streams)
    ]


async def _stream(
    session: aiohttp.ClientSession, url: str, draw: random.Random, number: int, options: Namespace
) -> int:
    """Its requests of one turn, one after the other; the tokens that came.

    The first output of each stream is shorter than that of the next, so that they do not all end in the same steps.
    """
    tokens = 0
    outputs = max(1, _OUTPUTS * (number + 1) // options.streams)
    for _ in range(1 + options.requests):
        prompt = [draw.randrange(100, 40000) for _ in range(_PROMPT)]
        reply = await complete(session, url, prompt, outputs)
        if not reply.finished:
            raise SystemExit(f"a request failed: {reply.status} {reply.error}")
        tokens += len(reply.times)
        outputs = _OUTPUTS
    return tokens


async def _ask(session: aiohttp.ClientSession, url: str, path: str) -> int:
    """Once. No tokens come of it."""
    async with session.get(url + path) as response:
        text = await response.text()
    if response.status != 200:
        raise SystemExit(f"{path} failed: {response.status} {text[:300]}")
    return 0
