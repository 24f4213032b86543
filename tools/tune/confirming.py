"""The best settings and the defaults on the real server, each under the whole trace, in an order drawn from a seed."""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_proc.event_log import EventLogError
from tools.drills.server import server
from tools.loadgen.lag import Limits
from tools.loadgen.latencies import Latencies, latencies_of
from tools.loadgen.runner import Run, RunError
from tools.loadgen.schedule import Phases, open_loop
from tools.loadgen.servers import ServerError
from tools.loadgen.slo import Slo
from tools.loadgen.sources import Request
from tools.loadgen.summary import summarize
from tools.loadgen.synthetic import TRACE_ARRIVALS
from tools.simulate.costs import PlanShape
from tools.simulate.replay import Replay, replay
from tools.traces import scaled_rate
from tools.tune.figures import Figures, figures
from tools.tune.load import end_on_signals, send, target_at
from tools.tune.predicting import Calibration, slowdown

_WARM_UP_REQUESTS = 20
_WARM_UP_SECONDS = 15.0
_SECONDS_BESIDE = 10.0  # a server's start and end, and the answers after the last arrival; a guess

Say = Callable[[str], None]


@dataclass(slots=True)
class Measurement:
    """Of one combination of settings, over all its rounds. `void`: why the client was the bottleneck, if it was.

    `servers`: what `fitted` takes, of these very runs. `before`: steps of the warm-ups alone, with their seconds.
    `lost`: for each run that could not be made, a line that says why.
    """

    answered: list[Latencies] = field(default_factory=list)
    requests: int = 0
    void: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    servers: list[tuple[Replay, list[Run]]] = field(default_factory=list)
    before: list[tuple[PlanShape, float]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, run: Run, warm_up: Run, log: Replay) -> None:
        """Another round, with all that the log of its server has seen."""
        summary = summarize(run.records, workers=run.workers, limits=Limits(), slo=None, added_tokens=0)
        self.answered += [latencies_of(record) for record in run.records if record.outcome == "ok"]
        self.requests += len(run.records)
        self.void += summary.client.void
        self.failures += [f"{failure.outcome}: {failure.detail}" for failure in summary.failures]
        self.servers.append((log, [warm_up, run]))
        pairs = zip(log.measured, log.measured_at, strict=True)
        self.before += [step for step, ended in pairs if ended < run.started_monotonic]

    def slowdown(self, calibration: Calibration) -> float:
        """How much longer its steps took than was to be expected, all together."""
        return slowdown(calibration, [step for log, _ in self.servers for step in log.measured])

    def figures(self, rate: float, slo: Slo) -> Figures:
        return figures(self.answered, self.requests, rate, slo)


def order_of(arms: int, rounds: int, seed: int) -> list[int]:
    """Which arm is measured when: in each round all of them, each time in another order."""
    source = random.Random(seed)
    return [arm for _ in range(rounds) for arm in source.sample(range(arms), arms)]


async def confirm(
    model: str,
    arms: Sequence[Sequence[str]],
    requests: Sequence[Request],
    found: Sequence[Measurement],
    *,
    rounds: int,
    seed: int,
    say: Say,
) -> None:
    """Measure each arm, given by its flags, and add to its `found` what comes of it: so that whatever ends this early,
    nothing is lost of what was measured before.

    A fresh server each time, warmed up with the beginning of the trace. A run that fails is among its arm's `lost`.
    """
    order = order_of(len(arms), rounds, seed)
    schedule = open_loop(requests, TRACE_ARRIVALS, Phases())
    for number, arm in enumerate(order, 1):
        say(
            f"measuring {number} of {len(order)}, about {duration(seconds_of(requests, len(order) - number + 1))} to go"
        )
        try:
            with tempfile.TemporaryDirectory(prefix="tokenmill-tune-") as folder:
                log = Path(folder) / "events.log"
                async with server(model, *arms[arm], f"--event-log={log}") as url:
                    target = await target_at(url)
                    warm_up = await send(open_loop(_warm_up(requests), TRACE_ARRIVALS, Phases()), target, "warm-up")
                    run = await send(schedule, target, f"arm-{arm}")
                found[arm].add(run, warm_up, replay(log))
        except (RunError, ServerError, EventLogError, OSError, SystemExit) as error:  # the last: it does not start
            say(f"this run is lost: {error}")
            found[arm].lost.append(_in_a_line(error))
            end_on_signals()  # which a run that fails does not give back


def _in_a_line(error: BaseException) -> str:
    """What a server's launch says that failed ends with its log, of which the last line has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


def seconds_of(requests: Sequence[Request], runs: int) -> float:
    """About how long `confirm` takes for so many runs of the trace."""
    return runs * (_warm_up(requests)[-1].time + requests[-1].time + _SECONDS_BESIDE)


def duration(seconds: float) -> str:
    """For people, who want to know how long they have."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _warm_up(requests: Sequence[Request]) -> list[Request]:
    """The first requests, at their own rate or so fast that they do not last long."""
    first = requests[:_WARM_UP_REQUESTS]
    return scaled_rate(first, max(1.0, first[-1].time / _WARM_UP_SECONDS))
