"""Overload with and without SLO-aware admission: a real trace, faster and faster, and what is still in time.

A request is good when its first token came within the TTFT limit and the others at the TPOT limit; what was refused,
failed or late is a miss. The peak is the highest arrival rate, found by bisection, at which
90% of the requests are good.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tools.drills.server import Reply, complete, http, server

_ATTAINMENT = 0.9
_PROBE_SECONDS = 30.0


@dataclass(slots=True, frozen=True)
class Arrival:
    at: float  # seconds in the trace
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True, frozen=True)
class Outcome:
    """One run at one rate; seconds and requests per second."""

    rate: float
    sent: int
    good: int
    goodput: float
    refused: int
    refusal_p99: float
    ttft: float  # median of those that got a token
    worst_lag: float  # how late the client itself was


def read_trace(path: str, length_scale: float, limit: int) -> list[Arrival]:
    """Arrivals of an Azure trace with lengths scaled, at least one token each; prompts are random and all different."""
    rng = random.Random(11)
    arrivals = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"--trace {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            count = max(1, round(row["input_length"] * length_scale))
            prompt = [rng.randrange(100, 40000) for _ in range(count)]
            arrivals.append(Arrival(row["timestamp"] / 1e3, prompt, max(1, round(row["output_length"] * length_scale))))
        except (ValueError, KeyError, TypeError):
            message = "not a JSON object with the numbers timestamp, input_length and output_length"
            raise SystemExit(f"--trace {path}: line {number}: {message}") from None
        if len(arrivals) == limit:
            break
    return arrivals


async def run(options: Namespace) -> None:
    """Print the peak, then the goodput at three times its rate with and without admission control."""
    arrivals = read_trace(options.trace, options.length_scale, options.requests)
    mean_in = statistics.mean(len(arrival.prompt) for arrival in arrivals)
    mean_out = statistics.mean(arrival.max_tokens for arrival in arrivals)
    print(
        f"{len(arrivals)} requests, lengths x {options.length_scale:g}: {mean_in:.0f} in, {mean_out:.1f} out on "
        f"average; SLO: TTFT {options.slo_ttft_ms:g} ms, TPOT {options.slo_tpot_ms:g} ms"
    )
    admission = ("--ttft-target-ms", f"{options.slo_ttft_ms * options.margin:g}")
    pace = ("--max-itl-ms", f"{options.slo_tpot_ms:g}")
    async with server(options.model, *admission, *pace) as url, http() as session:
        await _run_at(session, url, arrivals[:40], 2.0, options)  # the step-time model learns
        peak = await _bisect(session, url, arrivals, options)
        peak = await _run_at(session, url, arrivals, peak.rate, options)
        _show("peak", peak, peak)
        _show("3x, admission", await _run_at(session, url, arrivals, 3 * peak.rate, options), peak)
    async with server(options.model, *pace) as url, http() as session:
        await _run_at(session, url, arrivals[:40], 2.0, options)
        _show("3x, without", await _run_at(session, url, arrivals, 3 * peak.rate, options), peak)


async def _bisect(session: aiohttp.ClientSession, url: str, arrivals: list[Arrival], options: Namespace) -> Outcome:
    low: Outcome | None = None
    rate, high = options.first_rate, 0.0
    for _ in range(options.probes):
        outcome = await _run_at(session, url, arrivals[: max(30, int(rate * _PROBE_SECONDS))], rate, options)
        _show("probe", outcome, None)
        if outcome.good >= _ATTAINMENT * outcome.sent:
            low = outcome
        else:
            high = rate
        rate = (low.rate + high) / 2 if low and high else rate * 2 if not high else rate / 2
    if low is None:
        raise SystemExit(f"even {rate:g} requests/s miss the SLO: it cannot be met on this machine")
    return low


async def _run_at(
    session: aiohttp.ClientSession, url: str, arrivals: Sequence[Arrival], rate: float, options: Namespace
) -> Outcome:
    """Open loop: the trace's own arrival pattern, stretched to `rate` requests a second."""
    span = arrivals[-1].at - arrivals[0].at
    stretch = (len(arrivals) - 1) / rate / span
    begin = time.perf_counter() + 0.1
    worst_lag = 0.0
    tasks: list[tuple[float, asyncio.Task[Reply]]] = []
    for arrival in arrivals:
        due = begin + (arrival.at - arrivals[0].at) * stretch
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        worst_lag = max(worst_lag, time.perf_counter() - due)
        request = complete(session, url, arrival.prompt, arrival.max_tokens)
        tasks.append((due, asyncio.create_task(request)))
    replies = [(due, await task) for due, task in tasks]
    seconds = max(reply.ended for _, reply in replies) - begin
    arriving = len(arrivals) / rate
    good = sum(_is_good(due, reply, options) for due, reply in replies)
    refusals = sorted(reply.ended - reply.sent for _, reply in replies if reply.status == 429)
    failed = [reply for _, reply in replies if not reply.finished and reply.status != 429]
    if failed:
        print(f"  {len(failed)} requests failed, the first: {failed[0].status} {failed[0].error}", file=sys.stderr)
    return Outcome(
        rate=rate,
        sent=len(arrivals),
        good=good,
        goodput=good / max(seconds, arriving),
        refused=len(refusals),
        refusal_p99=refusals[int(0.99 * (len(refusals) - 1))] if refusals else 0.0,
        ttft=statistics.median([reply.times[0] - due for due, reply in replies if reply.times] or [0.0]),
        worst_lag=worst_lag,
    )


def _is_good(due: float, reply: Reply, options: Namespace) -> bool:
    """TTFT counts from when the request was due, not from when the client got round to sending it."""
    return (
        reply.finished and reply.times[0] - due <= options.slo_ttft_ms / 1e3 and reply.tpot <= options.slo_tpot_ms / 1e3
    )


def _show(name: str, outcome: Outcome, peak: Outcome | None) -> None:
    ratio = f", {outcome.goodput / peak.goodput:.2f} of the peak" if peak else ""
    print(
        f"{name:14} {outcome.rate:6.2f} requests/s: {outcome.good}/{outcome.sent} good, goodput "
        f"{outcome.goodput:.2f}/s{ratio}; {outcome.refused} refused (p99 {outcome.refusal_p99 * 1e3:.0f} ms), median "
        f"TTFT {outcome.ttft * 1e3:.0f} ms, client lag at most {outcome.worst_lag * 1e3:.0f} ms",
        flush=True,
    )
