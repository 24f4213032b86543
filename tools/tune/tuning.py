"""The steps of one invocation: what is asked for, calibration, search, confirmation."""

import argparse
import asyncio
import operator
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from config.arch import read_arch
from config.machine import Machine
from config.recordings import EVENT_LOG, is_of_kind
from config.resolve import resolve
from config.schema import Config, ModelArch
from config.sources import ConfigError, read_settings
from launch.gpu_probe import find_gpus
from launch.helpers import interruptible
from launch.kernels import find_kernels
from launch.machine import look_around
from launch.model_source import ModelSource, locate
from tools.loadgen.sources import read_source
from tools.simulate.simulator import SimulationError
from tools.simulate.traces import infinite_cache_hits
from tools.traces import scaled_rate
from tools.tune.calibrating import calibrate
from tools.tune.calibration_file import read_calibration, subject_of, write_calibration
from tools.tune.confirming import Measurement, confirm, duration, seconds_of
from tools.tune.figures import Figures
from tools.tune.load import end_on_signals
from tools.tune.predicting import Calibration, Prediction, predict, rate_of
from tools.tune.report import Ablation
from tools.tune.search import Point, Score, Search
from tools.tune.simulating import Pool, Source, Work
from tools.tune.space import Candidate, Space, Workload
from tools.tune.trials import Trial, cells_of

T = TypeVar("T")

_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of what the search has found
_SHARE_STEP = 0.01  # shares of requests that differ by less are told apart by their strain
_FEW_REQUESTS = 50
_PROGRESS_SECONDS = 5.0


class UsageError(Exception):
    """Options that do not go together; the text is one line for the user."""


class Progress:
    """Lines on stderr with the time."""

    def __init__(self) -> None:
        self._begun = self._said = time.monotonic()

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"[{self._said - self._begun:5.0f} s] {text}", file=sys.stderr, flush=True)

    def now_and_then(self, text: str) -> None:
        """The same, unless the last line is too fresh."""
        if time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self.say(text)


class Tuning:
    """Made from the command line; raises ConfigError, UsageError, TraceError, StartError and OSError."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress) -> None:
        self._arguments = arguments
        self._say = progress.say
        self._progress = progress
        if arguments.best > len(_NAMES):
            raise UsageError(f"--best {arguments.best}: at most {len(_NAMES)}")
        settings = read_settings(arguments.server, os.environ, "")
        if settings.plan:
            raise UsageError("--plan: not for a server that is to be tuned")
        asked = settings.config
        if not asked.server.frontends:
            raise UsageError("--frontends 0: the server is measured over HTTP")
        self.model = asked.model.model
        self._flags = list(arguments.server)
        if arguments.trace.exists() and not arguments.trace.is_file():
            raise UsageError(f"--trace {arguments.trace}: must be a file, which is read several times")
        if is_of_kind(EVENT_LOG, arguments.trace):
            raise UsageError(
                f"--trace {arguments.trace}: an event log cannot be sent to a server again; what --record writes can"
            )
        requests, _ = read_source(arguments.trace, limit=arguments.limit, length_scale=arguments.length_scale)
        self._source = Source(str(arguments.trace), arguments.limit, arguments.length_scale, arguments.rate_scale)
        self.requests = scaled_rate(requests, arguments.rate_scale)
        self.trace = self._source.read()
        self.rate = rate_of(self.trace)
        if not self.rate:
            raise UsageError(f"--trace {arguments.trace}: its requests come at one moment, so there is no rate")
        arch, machine, source = _found(asked, self._say)
        workload = Workload(
            longest_prompt=max(request.input_length for request in self.trace),
            requests=len(self.trace),
            shares_prefixes=infinite_cache_hits(self.trace, asked.scheduler.block_size) > 0,
        )
        self.space = Space(
            asked,
            arch,
            machine,
            given=settings.given,
            slo=arguments.slo,
            workload=workload,
            only=arguments.settings or (),
            may_refuse=arguments.may_refuse,
        )
        self._subject = subject_of(resolve(asked, arch, machine).config, machine, source)
        if not self.space.dimensions:
            raise UsageError("no setting is left to be searched: the flags after -- or --settings leave none open")
        self._left_out: list[str] = []
        self._cells = cells_of(self.space, arguments.grid, self._left_out.append)
        self._longest_prompt = min(workload.longest_prompt, self.space.default.max_model_len - 1)

    @property
    def default(self) -> Point:
        return (0,) * len(self.space.sizes)

    def notes(self) -> list[str]:
        """What is about to be done, for the user."""
        trace, limit = self.trace, self.space.default.max_model_len
        prompts = sum(request.input_length for request in trace)
        outputs = sum(request.output_length for request in trace)
        longer = sum(request.input_length + request.output_length > limit for request in trace)
        settings = ", ".join(dimension.name for dimension in self.space.dimensions)
        aim = "the highest rate at which 90% meet the SLO" if self._arguments.find_rate else "goodput at this rate"
        found = [
            f"{self._arguments.trace.name}: {len(trace):,} requests, {prompts:,} prompt and {outputs:,} output tokens "
            f"in {trace[-1].time:,.1f} s: {self.rate:.3f} req/s",
            f"objective: {aim}; searched: {settings}",
        ]
        if longer:
            found.append(f"{longer:,} requests are longer than the server's {limit:,} tokens and are misses")
        if len(trace) < _FEW_REQUESTS:
            found.append(f"{len(trace)} requests are few: shares of them say little")
        found += [f"--grid: left out, since the server would refuse it: {reason}" for reason in self._left_out]
        return [*found, self._foreseen()]

    def _foreseen(self) -> str:
        """How long all of it will take, as far as that is known."""
        arguments = self._arguments
        parts = []
        if arguments.calibration is None or not arguments.calibration.exists():
            parts.append(("calibration", arguments.calibration_seconds))
        if arguments.confirm:
            most = (1 + arguments.best + len(self._cells)) * arguments.rounds
            rate = " at the trace's own rate" if arguments.find_rate else ""
            parts.append((f"confirmation of at most {most} runs{rate}", seconds_of(self.requests, most)))
        text = " and ".join(f"{name} about {duration(seconds)}" for name, seconds in parts)
        return f"time foreseen: {text}, and the search" if text else "time foreseen: that of the search"

    # --- calibration ---

    def calibration(self) -> Calibration:
        """From `--calibration` where that exists, else measured, and kept there.

        RunError, CalibrationError, CalibrationFileError.
        """
        file: Path | None = self._arguments.calibration
        if file is not None and file.exists():
            return read_calibration(file, self._subject)
        seconds = self._arguments.calibration_seconds
        self._say(f"calibration, about {seconds:.0f} s")
        largest = self._largest_steps()
        most_users = self.space.default.config.max_seqs
        assert most_users is not None
        found = _ended_by_signals(
            calibrate(
                self.model,
                [*self._flags, *self.space.flags(largest)],
                longest_prompt=self._longest_prompt,
                most_users=most_users,
                seconds=seconds,
                seed=self._arguments.seed,
            )
        )
        if file is not None:
            write_calibration(file, self._subject, found)
        return found

    def _largest_steps(self) -> Point:
        """The most tokens a step that are tried and possible: what steps cost is then seen for all sizes."""
        for position, dimension in enumerate(self.space.dimensions):
            if dimension.name == "max_step_tokens":
                sizes = [(value, index) for index, value in enumerate(dimension.values) if isinstance(value, int)]
                for _, index in sorted(sizes, reverse=True):
                    point = (*self.default[:position], index, *self.default[position + 1 :])
                    if self.space.candidate(point) is not None:
                        return point
        return self.default

    # --- search ---

    def search(self, pool: Pool) -> tuple[dict[Point, Prediction], list[Point]]:
        """All predictions, and the points to be confirmed, the best first. PoolError."""
        found: dict[Point, Prediction] = {}

        def evaluate(points: Sequence[Point]) -> list[Score | None]:
            answers = self.predicted(pool, points)
            found.update((point, answer) for point, answer in zip(points, answers, strict=True) if answer is not None)
            if found:
                self._progress.now_and_then(_found_text(found))
            return [None if answer is None else score(answer) for answer in answers]

        arguments = self._arguments
        with interruptible():
            outcome = Search(self.space.sizes, evaluate, budget=arguments.budget, seed=arguments.seed).run()
        if self.default not in found:
            raise UsageError("the scheduler gets stuck with your flags in this trace's simulation")
        self._say(_found_text(found))
        return found, different(outcome.order, outcome.scores, arguments.best)

    def trials(self, pool: Pool, best: Sequence[Point], predictions: Mapping[Point, Prediction]) -> list[Trial]:
        """What is to be confirmed: the defaults, the best, and of the grid what is none of these. PoolError."""
        points = [self.default, *(point for point in best if point != self.default)]
        grid = {cell.candidate for cell in self._cells}
        found: dict[Candidate, Trial] = {}
        for name, point in zip(("defaults", *_NAMES), points, strict=False):
            candidate = self._candidate(point)
            flags = self.space.flags(point)
            found.setdefault(candidate, Trial(name, point, flags, candidate, predictions[point], candidate in grid))
        fresh = [cell for cell in self._cells if cell.candidate not in found]
        for number, (cell, answer) in enumerate(
            zip(fresh, pool.predict([cell.candidate for cell in fresh]), strict=True), 1
        ):
            if answer is None:
                self._say(f"--grid: left out, since the scheduler gets stuck with it: {' '.join(cell.flags)}")
            else:
                found[cell.candidate] = Trial(f"G{number}", None, cell.flags, cell.candidate, answer, True)
        return list(found.values())

    def _candidate(self, point: Point) -> Candidate:
        """Of a point that was simulated."""
        candidate = self.space.candidate(point)
        assert candidate is not None
        return candidate

    def predicted(self, pool: Pool, points: Sequence[Point]) -> list[Prediction | None]:
        candidates = [self.space.candidate(point) for point in points]
        answers = iter(pool.predict([candidate for candidate in candidates if candidate is not None]))
        return [None if candidate is None else next(answers) for candidate in candidates]

    def ablations(self, pool: Pool, trial: Trial) -> list[Ablation]:
        """The chosen settings, which the search has found, without each of their flags."""
        point = trial.point
        assert point is not None
        changed = [position for position, index in enumerate(point) if index]
        without = [(*point[:position], 0, *point[position + 1 :]) for position in changed]
        flags = [self.space.flags(_alone(point, position))[0] for position in changed]
        answers = self.predicted(pool, without)
        return [Ablation(flag, answer) for flag, answer in zip(flags, answers, strict=True) if answer is not None]

    # --- confirmation ---

    def at_rate(self, rate: float) -> None:
        """From here on the trace at that rate: where `--find-rate` has found the best settings' limit."""
        self.requests = scaled_rate(self.requests, rate / self.rate)
        self.trace = scaled_rate(self.trace, rate / self.rate)
        self.rate = rate

    def predict_again(self, calibration: Calibration, trial: Trial) -> Prediction | None:
        """At the rate that now is and with these costs; the highest rate is what was found before.

        None where the scheduler then gets stuck in the simulation.
        """
        try:
            again = predict(self.trace, trial.candidate, calibration, self._arguments.slo, find_rate=False)
        except SimulationError:
            return None
        return msgspec.structs.replace(again, highest_rate=trial.prediction.highest_rate)

    def runs(self, trials: Sequence[Trial]) -> int:
        """Of the trace, that the confirmation makes."""
        rounds: int = self._arguments.rounds
        return len(trials) * rounds

    def confirmation_foreseen(self, trials: Sequence[Trial]) -> str:
        """What is about to be measured, and how long that takes."""
        runs = self.runs(trials)
        return (
            f"confirmation at {self.rate:.3f} req/s: {runs} runs of the trace, about "
            f"{duration(seconds_of(self.requests, runs))}"
        )

    def confirm(self, trials: Sequence[Trial]) -> tuple[list[Measurement], bool]:
        """What was measured of each, and whether a signal has ended it early."""
        arguments = self._arguments
        found = [Measurement() for _ in trials]
        try:
            _ended_by_signals(
                confirm(
                    self.model,
                    [[*self._flags, *trial.flags] for trial in trials],
                    self.requests,
                    found,
                    rounds=arguments.rounds,
                    seed=arguments.seed,
                    say=self._say,
                )
            )
        except KeyboardInterrupt:
            return found, True
        return found, False

    def figures_of(self, measurement: Measurement) -> Figures:
        return measurement.figures(self.rate, self._arguments.slo)

    def work(self, calibration: Calibration) -> Work:
        arguments = self._arguments
        return Work(self._source, calibration, arguments.slo, arguments.find_rate)


def different(order: Sequence[Point], scores: Mapping[Point, Score], most: int) -> list[Point]:
    """The first points of `order` that are worth different things and differ in two settings from each other.

    Where there are too few, in one.
    """
    chosen: list[Point] = []
    for least in (2, 1):
        for point in order:
            apart = all(
                scores[point] != scores[other] and sum(map(operator.ne, point, other)) >= least for other in chosen
            )
            if apart and len(chosen) < most:
                chosen.append(point)
    return sorted(chosen, key=order.index)


def score(prediction: Prediction) -> Score:
    """What the search compares: the highest rate where it was asked for, the share in time, and then the strain."""
    found = prediction.figures
    strain = float("inf") if found.strain is None else found.strain
    return prediction.highest_rate or 0.0, round(found.share / _SHARE_STEP) * _SHARE_STEP, -strain


def _found_text(found: Mapping[Point, Prediction]) -> str:
    best = max(found.values(), key=score)
    rate = "" if best.highest_rate is None else f"{best.highest_rate:.2f} req/s, "
    return f"{len(found):,} combinations simulated, best: {rate}{best.figures.share:.1%} in time"


def _alone(point: Point, position: int) -> Point:
    return tuple(index if other == position else 0 for other, index in enumerate(point))


def _found(asked: Config, say: Callable[[str], None]) -> tuple[ModelArch, Machine, ModelSource]:
    """The model, the machine, and where the model's files are, as the launcher sees them."""
    source = locate(asked.model.model, asked.model.revision, needs_weights=True)
    try:
        arch = read_arch(source.path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--model {asked.model.model}: {error}") from None
    return arch, find_kernels(asked, find_gpus(asked, look_around(), say), say), source


def _ended_by_signals(work: Coroutine[Any, Any, T]) -> T:
    async def run() -> T:
        end_on_signals()
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
