"""`python -m tools.tune`: settings for a trace and an SLO. See docs/tune.md."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from config.output_files import check_apart, check_output
from config.sources import ConfigError
from ipc.control import StartError
from launch.helpers import interruptible
from tools.loadgen.runner import RunError
from tools.loadgen.servers import ServerError
from tools.traces import TraceError
from tools.tune.calibrating import CalibrationError, fitted
from tools.tune.calibration_file import CalibrationFileError
from tools.tune.comparing import compared, comparison_text, overview
from tools.tune.confirming import Measurement
from tools.tune.grid import GridError
from tools.tune.options import build_parser
from tools.tune.predicting import Calibration, rescaled
from tools.tune.report import Ablation, Arm, ablation_text, better, choice_text, error_of, error_text, table
from tools.tune.simulating import Pool, PoolError
from tools.tune.trials import Trial
from tools.tune.tuning import Progress, Tuning, UsageError

_FAILED, _WRONG_INPUT, _VOID, _INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        for flag in ("json", "calibration"):
            if (output := getattr(arguments, flag)) is not None:
                check_output(f"--{flag}", output)
        check_apart({f"--{name}": getattr(arguments, name) for name in ("trace", "calibration", "json")})
        return _run(arguments, Progress())
    except (ConfigError, UsageError, TraceError, CalibrationFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_INPUT
    except GridError as error:
        print(f"error: --grid: {error}", file=sys.stderr)
        return _WRONG_INPUT
    except (StartError, CalibrationError, ServerError, RunError, PoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return _WRONG_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    tuning = Tuning(arguments, progress)
    notes = tuning.notes()
    print("\n".join(notes), flush=True)
    calibration = tuning.calibration()
    print(_calibration_text(calibration), flush=True)
    with Pool(tuning.work(calibration), min(arguments.processes, arguments.budget)) as pool:
        predictions, best = tuning.search(pool)
        trials = tuning.trials(pool, best, predictions)
        arms = [_arm(trial) for trial in trials]
        missing = _Missing()
        if arguments.confirm:
            arms = _confirmed(tuning, calibration, trials, arms, missing, find_rate=arguments.find_rate)
        chosen = better([arm for arm in arms if arm.searched])
        trial = trials[arms.index(chosen)]
        parts = _ablations(tuning, pool, trial, missing)
    # The search's predictions, which are at the trace's own rate as those without a flag are; arms may be at another.
    contributions = ablation_text(trial.prediction, trials[0].prediction, parts)
    _report(arguments, notes, calibration, arms, chosen, parts, contributions, missing.texts)
    if missing.interrupted:
        return _INTERRUPTED
    if missing.texts:
        return _FAILED
    return _VOID if any(arm.void for arm in arms) else 0


@dataclass(slots=True)
class _Missing:
    """What of the report there is not, in lines that say why. What was measured by then took long, and is told."""

    texts: list[str] = field(default_factory=list)
    interrupted: bool = False


def _arm(trial: Trial) -> Arm:
    return Arm(
        name=trial.name,
        flags=trial.flags,
        predicted=trial.prediction,
        searched=trial.point is not None,
        in_grid=trial.in_grid,
    )


def _confirmed(
    tuning: Tuning,
    calibration: Calibration,
    trials: Sequence[Trial],
    arms: Sequence[Arm],
    missing: _Missing,
    *,
    find_rate: bool,
) -> list[Arm]:
    """The arms with what was measured of them, which is not all that should have been where `missing` says so."""
    predicted = [arm.predicted for arm in arms]
    rates = [prediction.highest_rate for prediction in predicted if prediction.highest_rate]
    if find_rate and rates:
        tuning.at_rate(max(rates))
        predicted = [tuning.predict_again(calibration, trial) or trial.prediction for trial in trials]
    print(tuning.confirmation_foreseen(trials), flush=True)
    found, missing.interrupted = tuning.confirm(trials)
    confirmed = [
        msgspec.structs.replace(
            arm,
            predicted=prediction,
            measured=tuning.figures_of(measurement) if measurement.requests else None,
            void=measurement.void,
            failures=measurement.failures,
            lost=measurement.lost,
        )
        for arm, prediction, measurement in zip(arms, predicted, found, strict=True)
    ]
    runs, lost = tuning.runs(trials), sum(len(measurement.lost) for measurement in found)
    some = any(arm.measured and arm.searched for arm in confirmed)
    choice = f"the choice is of what {'was measured' if some else 'is predicted'}"
    if lost:
        missing.texts.append(f"{lost} of {runs} runs could not be made; {choice}")
    if missing.interrupted:
        made = sum(len(measurement.servers) for measurement in found)
        missing.texts.append(f"interrupted after {made} of {runs} runs; {choice}")
        return confirmed
    try:
        with interruptible():
            for number, (trial, measurement) in enumerate(zip(trials, found, strict=True)):
                if measurement.requests:
                    confirmed[number] = _explained(tuning, calibration, trial, confirmed[number], measurement)
    except KeyboardInterrupt:
        missing.interrupted = True
        missing.texts.append("interrupted before the measured runs were simulated with their own costs")
    return confirmed


def _explained(tuning: Tuning, calibration: Calibration, trial: Trial, arm: Arm, measurement: Measurement) -> Arm:
    """With what the simulator says of it when it knows how fast its steps were."""
    afterwards, unfitted = None, ""
    try:
        afterwards = tuning.predict_again(fitted(measurement.servers), trial)
    except CalibrationError as error:  # what was measured of it, and of the others, counts all the same
        unfitted = str(error)
    return msgspec.structs.replace(
        arm,
        rescaled=tuning.predict_again(rescaled(calibration, measurement.before), trial),
        afterwards=afterwards,
        unfitted=unfitted,
        slowdown=measurement.slowdown(calibration),
    )


def _ablations(tuning: Tuning, pool: Pool, trial: Trial, missing: _Missing) -> list[Ablation]:
    """None after an interrupt: whoever has pressed Ctrl-C is to wait for nothing more."""
    if missing.interrupted:
        return []
    try:
        with interruptible():
            return tuning.ablations(pool, trial)
    except KeyboardInterrupt:
        missing.interrupted = True
        missing.texts.append("interrupted before it was told what each flag contributes")
    except PoolError as error:
        missing.texts.append(f"what each flag contributes is not known: {error}")
    return []


def _calibration_text(found: Calibration) -> str:
    outside = found.outside
    return (
        f"step cost in microseconds: {found.cost} ({found.steps:,} steps, median error {found.median_error:.1%}); "
        f"outside of steps: {outside.arrive_us / 1e3:.1f} ms to the scheduler, {outside.deliver_us / 1e3:.1f} ms back "
        f"({found.requests:,} requests)"
    )


def _report(
    arguments: argparse.Namespace,
    notes: Sequence[str],
    calibration: Calibration,
    arms: Sequence[Arm],
    chosen: Arm,
    parts: Sequence[Ablation],
    contributions: Sequence[str],
    missing: Sequence[str],
) -> None:
    searched = [arm for arm in arms if arm.searched]
    print("\n" + "\n".join(f"{arm.name}: {arm.text}" for arm in searched))
    print("\n" + table(searched) + "\n")
    comparison = compared(chosen, arms)
    if any(arm.in_grid for arm in arms):
        print(overview(arms) + "\n")
    if arguments.find_rate and all(arm.predicted.highest_rate is None for arm in arms):
        print("no rate is so low that 90% would meet the SLO; compared is the share in time at the trace's own rate")
    if any(arm.measured for arm in arms):
        print("\n".join(error_text(arms)))
    for arm in arms:
        for reason in arm.void:
            print(f"VOID: {arm.name}: the load generator was the bottleneck: {reason}")
        if arm.failures:
            print(f"{arm.name}: {len(arm.failures)} requests failed, the first: {arm.failures[0]}")
        for reason in arm.lost:
            print(f"{arm.name}: a run could not be made: {reason}")
        if arm.unfitted:
            print(f"{arm.name}: what its steps cost cannot be told from its own runs: {arm.unfitted}")
    for text in missing:
        print(f"INCOMPLETE: {text}")
    print(f"\nchosen: {chosen.text}")
    print("\n".join([choice_text(chosen, arms[0]), *contributions]))
    if comparison is not None:
        print(comparison_text(comparison, chosen, arms))
    if arguments.json is not None:
        report = {
            "notes": notes,
            "incomplete": missing,
            "calibration": calibration,
            "arms": arms,
            "errors": [error_of(arm, arm.predicted) for arm in arms if arm.measured],
            "errors_rescaled": [error_of(arm, arm.rescaled) for arm in arms if arm.rescaled],
            "errors_afterwards": [error_of(arm, arm.afterwards) for arm in arms if arm.afterwards],
            "grid": comparison,
            "chosen": chosen.name,
            "flags": chosen.flags,
            "ablations": parts,
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    sys.exit(main())
