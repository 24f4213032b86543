"""Measure on a real server what the simulator has to know: how long steps take, and what passes outside of them."""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.drills.server import server
from tools.loadgen.messages import Record, Target
from tools.loadgen.runner import Run
from tools.loadgen.schedule import Phases, Schedule, closed_loop
from tools.loadgen.sources import Request
from tools.loadgen.synthetic import Arrivals
from tools.simulate.costs import CostError, Outside, fit_cost, fit_variation
from tools.simulate.replay import Replay, replay
from tools.tune.load import send, target_at
from tools.tune.predicting import Calibration

_SHORTEST_PROMPT = 16
_OUTPUTS = 8, 24, 40  # tokens
_ALONE_OUTPUT = 8
_SIZES_ALONE = 10  # prompts of growing length, one after the other
_WARM_UP = 3
_MOST_OF_A_SIZE = 20  # prompts alone, beside the first one
_OUTPUT_WORTH = 64  # prompt tokens that take about as long as `_ALONE_OUTPUT`; a guess, for shares of time
_SHARE_FIRST, _SHARE_ALONE = 1 / 2, 1 / 3  # of the time, at most: for the first of each size, for them and more of them
_ALONE_SECONDS = 0.02  # since the one before it was sent
_MOST_ROUNDS = 4  # of requests of each user


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request as its client knows it: seconds on the clock of `time.monotonic`, `start` that of the run."""

    time: float
    start: float
    record: Record
    is_alone: bool


class CalibrationError(Exception):
    """Nothing could be measured; the text is one line for the user."""


def batch_sizes(most: int) -> list[int]:
    """Users at once, doubling up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def sizes_alone(longest: int) -> list[int]:
    """Lengths of prompts from short to long, in tokens, evenly spaced on a logarithmic scale."""
    sizes = np.geomspace(min(_SHORTEST_PROMPT, longest), longest, _SIZES_ALONE).round().astype(int)
    return sorted(set(sizes.tolist()))


def alone(longest: int) -> list[Request]:
    """A prompt of each length, after a few to warm up."""
    sizes = sizes_alone(longest)
    return [Request(0.0, size, _ALONE_OUTPUT) for size in [sizes[0]] * _WARM_UP + sizes]


def more_alone(longest: int) -> list[Request]:
    """More of the same, as many as there may be time for.

    Next comes a prompt of the length on which the least time will then have been spent, so that whenever it ends the
    lengths have shared the time evenly: for each long prompt there are many short ones.
    """
    sizes = sizes_alone(longest)
    spent = dict.fromkeys(sizes, 0)
    left = dict.fromkeys(sizes, _MOST_OF_A_SIZE)
    found = []
    while left:
        size = min(left, key=lambda size: (spent[size] + size, size))
        spent[size] += size + _OUTPUT_WORTH
        left[size] -= 1
        if not left[size]:
            del left[size]
        found.append(Request(0.0, size, _ALONE_OUTPUT))
    return found


def together(rng: np.random.Generator, longest: int, users: int, tokens: float) -> list[Request]:
    """For so many users, a few rounds, of about `tokens` prompt tokens all in all; as many short ones as long ones.

    Outputs are of a few lengths. Users whose answers end at the same moment send their prompts for the same step, the
    others for steps of their own: so steps are of many sizes, large ones among them.
    """
    # The mean of what is drawn is about a third of the longest.
    most = min(longest, max(2 * _SHORTEST_PROMPT, int(3 * tokens / (users * _MOST_ROUNDS))))
    least = min(_SHORTEST_PROMPT, most)
    sizes = np.exp(rng.uniform(math.log(least), math.log(most), users * _MOST_ROUNDS)).round().astype(int)
    outputs = rng.choice(_OUTPUTS, len(sizes))
    return [Request(0.0, size, output) for size, output in zip(sizes.tolist(), outputs.tolist(), strict=True)]


def _closed(requests: Sequence[Request], users: int, seconds: float | None) -> Schedule:
    return closed_loop(requests, Arrivals("closed", users=users), Phases(), seconds)


async def calibrate(
    model: str, flags: Sequence[str], *, longest_prompt: int, most_users: int, seconds: float, seed: int
) -> Calibration:
    """Start the server, load it with batches of growing size, and fit its event log.

    `longest_prompt` in tokens; `seconds`: about how long the load lasts. Raises `CalibrationError`, `RunError`.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-tune-") as folder:
        log = Path(folder) / "events.log"
        async with server(model, *flags, f"--event-log={log}") as url:
            target, rng = await target_at(url), np.random.default_rng(seed)
            runs = await _load(target, rng, longest_prompt, most_users, seconds)
        return fitted([(replay(log), runs)])


async def _load(target: Target, rng: np.random.Generator, longest: int, most_users: int, seconds: float) -> list[Run]:
    """One request at a time, which says how fast this server is, then more and more at once."""
    begun = time.monotonic()
    runs = [await send(_closed(alone(longest), 1, seconds * _SHARE_FIRST), target, "calibration-1")]
    tokens_per_second = sum(record.input_length for record in runs[0].records) / runs[0].records[-1].ended
    spare = seconds * _SHARE_ALONE - (time.monotonic() - begun)
    if spare > 0:
        runs.append(await send(_closed(more_alone(longest), 1, spare), target, "calibration-1-more"))
    left = seconds - (time.monotonic() - begun)
    sizes = batch_sizes(most_users)[1:]
    for number, users in enumerate(sizes):
        part = left / (len(sizes) - number)
        begun = time.monotonic()
        schedule = _closed(together(rng, longest, users, tokens_per_second * part / 2), users, part)
        runs.append(await send(schedule, target, f"calibration-{users}"))
        # At least some of each size, also where a batch took longer than it should have.
        left = max(seconds / 10, left - (time.monotonic() - begun))
    return runs


def fitted(servers: Sequence[tuple[Replay, Sequence[Run]]]) -> Calibration:
    """Of each server what its scheduler recorded, and the runs in which a client saw it.

    Both are on the clock of `time.monotonic`. Raises `CalibrationError`.
    """
    for log, _ in servers:
        if log.difference:
            raise CalibrationError(f"the server schedules otherwise than this program: {log.difference}")
    steps = [sample for log, _ in servers for sample in log.measured]
    try:
        fit = fit_cost(steps)
    except CostError as error:
        raise CalibrationError(str(error).removeprefix("--cost: ")) from None
    arriving: list[float] = []
    delivering: list[float] = []
    for log, runs in servers:
        _add_outside(log, runs, arriving, delivering)
    if not arriving:
        raise CalibrationError("no request was answered of which it can be told when the scheduler had it")
    return Calibration(
        cost=fit.cost,
        variation=fit_variation(steps, fit.cost),
        outside=Outside(*(max(0.0, float(np.median(times))) * 1e6 for times in (arriving, delivering))),
        steps=fit.steps,
        median_error=fit.median_error,
        requests=len(arriving),
    )


def _add_outside(log: Replay, runs: Sequence[Run], arriving: list[float], delivering: list[float]) -> None:
    """Seconds to the scheduler and back.

    The log has no ids: of equally long prompts the first one that was sent is taken for the first one that arrived. On
    the way to the scheduler, requests that are sent at one moment wait for each other; those do not count.
    """
    numbers: dict[int, list[int]] = {}
    for number, (_, submit) in enumerate(log.submits):
        numbers.setdefault(len(submit.token_ids) // 4, []).append(number)
    sent: dict[int, list[_Sent]] = {}
    last_sent = -math.inf
    requests = [(run.started_monotonic, record) for run in runs for record in run.records]
    for start, record in sorted(requests, key=lambda request: request[0] + request[1].sent):
        time_sent = start + record.sent
        is_alone = time_sent - last_sent >= _ALONE_SECONDS
        last_sent = time_sent
        sent.setdefault(record.input_length, []).append(_Sent(time_sent, start, record, is_alone))
    observer = log.observer
    for length, group in sent.items():
        if len(group) != len(numbers.get(length, ())):
            continue  # one of them has not come as far as the scheduler
        for number, request in zip(numbers[length], group, strict=True):
            if request.record.outcome != "ok":
                continue
            if request.is_alone:
                arriving.append(observer.arrival[number] - request.time)
            first, last = request.record.times[0], request.record.times[-1]
            delivering += [
                request.start + first - observer.first[number],
                request.start + last - observer.last[number],
            ]
