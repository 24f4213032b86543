"""`--find-rate`: run after run at rates that the search asks for."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.loadgen.messages import Record
from tools.loadgen.rate_search import TARGETS, Found, Probe, found, next_rate
from tools.loadgen.report import PROBE_LABELS, probe_rows, void_text
from tools.loadgen.runner import Run, RunError
from tools.loadgen.schedule import Schedule, at_rate, open_loop
from tools.loadgen.session import Load, Session, UsageError, phases_of
from tools.loadgen.summary import Summary
from tools.reports.table import render


@dataclass(slots=True)
class Search:
    """What came of it. `runs`: by rate, those that met the first target below all that did not."""

    probes: list[Probe] = field(default_factory=list)
    runs: dict[float, tuple[Run, Summary]] = field(default_factory=dict)
    interrupted: bool = False
    answered: int = 0  # requests, in all probes
    short: list[Probe] = field(default_factory=list)  # for which the load had too few requests
    failure: str = ""  # why it ended early, as when the server is gone; a line for the user

    @property
    def results(self) -> list[Found]:
        return [found(self.probes, target) for target in TARGETS]

    @property
    def best(self) -> tuple[Run, Summary] | None:
        """The run at the highest rate that met the first target."""
        return self.runs[max(self.runs)] if self.runs else None

    def add(self, probe: Probe, run: Run, summary: Summary) -> None:
        """A miss takes what met the target at a higher rate away: it does not count."""
        self.probes.append(probe)
        self.runs[probe.rate] = run, summary
        highest = self.results[0].rate
        self.runs = {rate: kept for rate, kept in self.runs.items() if highest is not None and rate <= highest}


def check_search(arguments: argparse.Namespace, load: Load) -> None:
    """Raises `UsageError` when there is no rate to be found."""
    if arguments.slo is None:
        raise UsageError("--find-rate: needs --slo")
    if load.arrivals.users:
        raise UsageError("--find-rate: not with closed users, who wait for their answers")
    if arguments.duration is not None:
        raise UsageError("--find-rate: not with --duration; --probe-seconds says how long each rate is tried")
    if load.requests[-1].time <= 0:
        raise UsageError("--find-rate: all requests come at one moment, so there is no rate")


async def search(arguments: argparse.Namespace, load: Load, session: Session) -> Search:
    """Probe after probe, until the highest rates are known or `--probes` have been.

    Raises `UsageError` and `RunError` when not even the first one can be.
    """
    first = _first_rate(load)
    state = Search()
    for target in TARGETS:
        while len(state.probes) < arguments.probes:
            rate = next_rate(state.probes, target, first, arguments.precision)
            if rate is None:
                break
            try:
                schedule = _schedule(arguments, load, rate)
            except UsageError as error:
                if not state.probes:
                    raise
                # What has been measured counts; this rate cannot be tried, and so neither can lower ones.
                _say(str(error))
                break
            is_short = len(load.requests) < round(rate * arguments.probe_seconds)
            if is_short:
                _say(_short_text(arguments, load, rate))
            try:
                run, summary = await _probed(session, schedule, rate)
            except RunError as error:
                if not state.probes:
                    raise
                state.failure = str(error)
                return state
            if run.interrupted:
                state.interrupted = True
                return state
            if _is_gone(run.records):
                # No miss: it says nothing of the rate, and at lower ones there would be nobody either.
                state.failure = _gone_text(run.records, rate, state.probes)
                return state
            assert summary.goodput is not None, "a search has an SLO"
            goodput = summary.goodput
            state.answered += summary.outcomes.get("ok", 0)
            probe = Probe(
                rate=rate,
                share=goodput.share,
                share_low=goodput.share_low,
                share_high=goodput.share_high,
                goodput=goodput.rate,
                measured=summary.measured,
                void=bool(summary.client.void),
            )
            state.add(probe, run, summary)
            if is_short:
                state.short.append(probe)
            _say(render(PROBE_LABELS, probe_rows([probe])), void_text(summary))
    return state


async def _probed(session: Session, schedule: Schedule, rate: float) -> tuple[Run, Summary]:
    """Once more where it was void: that may have been something else on the machine."""
    run, summary = await session.run(schedule)
    if not summary.client.void or run.interrupted or _is_gone(run.records):
        return run, summary
    _say(f"the probe at {rate:.3f} requests/s is void and is run again: {'; '.join(summary.client.void)}")
    return await session.run(schedule)


def open_notes(arguments: argparse.Namespace, load: Load, done: Search) -> list[str]:
    """A line for each target whose rate is not known to `--precision`: between which rates it lies, and why."""
    notes = []
    are_spent = len(done.probes) >= arguments.probes
    reason = f"--probes {arguments.probes} are spent" if are_spent else "the search ended early"
    for result in done.results if done.probes else ():
        if next_rate(done.probes, result.target, _first_rate(load), arguments.precision) is None:
            continue
        if result.rate is None:
            where = f"lies below {result.missed_at:.3f} requests/s; no rate that was tried met it"
        elif result.missed_at is None:
            where = f"is {result.rate:.3f} requests/s or more; no rate that was tried missed it"
        else:
            where = (
                f"lies between {result.rate:.3f} and {result.missed_at:.3f} requests/s, known to {result.known_to:.1%} "
                f"and not to the {arguments.precision:.1%} of --precision"
            )
        notes.append(f"the highest rate with {result.target:.0%} within the SLO {where}: {reason}")
    return notes


def _first_rate(load: Load) -> float:
    """At which a search begins: the load's own."""
    return (len(load.requests) - 1) / load.requests[-1].time


def short_notes(arguments: argparse.Namespace, load: Load, done: Search) -> list[str]:
    """A line for the report where probes lasted less than `--probe-seconds`."""
    if not done.short:
        return []
    least = min(probe.rate for probe in done.short)
    return [
        f"{len(done.short)} of {len(done.probes)} probes, from {least:.3f} requests/s on, lasted less than the "
        f"{arguments.probe_seconds:g} s of --probe-seconds, since there are only {len(load.requests):,} requests: "
        "what is short hides queues that grow; use a longer trace, or more --requests"
    ]


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _short_text(arguments: argparse.Namespace, load: Load, rate: float) -> str:
    number = len(load.requests)
    return (
        f"at {rate:.3f} requests/s all {number:,} requests come within {(number - 1) / rate:.1f} s: this probe is "
        f"shorter than the {arguments.probe_seconds:g} s of --probe-seconds"
    )


def _is_gone(records: Sequence[Record]) -> bool:
    """Whether not one request could connect, or had the connection broken before an answer began."""
    return bool(records) and all(record.outcome == "connection" for record in records)


def _gone_text(records: Sequence[Record], rate: float, probes: Sequence[Probe]) -> str:
    text = (
        f"the server is gone: all {len(records):,} connections for requests at {rate:.3f} requests/s failed: "
        f"{records[0].detail}"
    )
    if probes and probes[-1].share < TARGETS[0]:
        text += f"; what the probe at {probes[-1].rate:.3f} requests/s missed may be its end"
    return text


def _schedule(arguments: argparse.Namespace, load: Load, rate: float) -> Schedule:
    try:
        requests = at_rate(load.requests, rate, arguments.probe_seconds)
    except ValueError as error:
        raise UsageError(
            f"--find-rate: at {rate:.3f} requests/s {error}: use more --probe-seconds, or --arrivals poisson:RATE"
        ) from None
    schedule = open_loop(requests, load.arrivals, phases_of(arguments))
    if not schedule.measures_something:
        raise UsageError(f"--ramp, --warmup, --cooldown: nothing is left of {arguments.probe_seconds:g} s of a probe")
    return schedule
