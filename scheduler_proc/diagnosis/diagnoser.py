"""Asks of each change what it would do to each metric, and ranks.

A prediction is the measured value times what the replay of the window changes by: errors that the replay makes with and
without the change cancel out. How far it is from what was measured without one takes away from the confidence.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipc.stats_messages import Cause, CauseName, DiagnosedMetric, Diagnosis, MetricName
from scheduler_proc.cost_model import CostModel, StepShape
from scheduler_proc.diagnosis import evidence
from scheduler_proc.diagnosis.changes import Change, Engine, Proposals, growing_cost, setup_of
from scheduler_proc.diagnosis.processes import Cpu
from scheduler_proc.diagnosis.what_if import Outcome, Replay, Setup
from scheduler_proc.diagnosis.workload import Facts

# Names of parts.
FRONT = "tokenizer and HTTP"
OWN_PROMPT = "its own prompt"
WEIGHTS = "weights and fixed costs of a step"
CONTEXT = "reading the context"

# Mean and p99: the one must not lose by more than the other gains.
_SIBLINGS: dict[MetricName, MetricName] = {
    "ttft": "ttft_p99",
    "ttft_p99": "ttft",
    "itl": "itl_p99",
    "itl_p99": "itl",
}
HIGHER_IS_BETTER = ("throughput", "concurrency")
_LEAST_GAIN = math.log(1.1)  # a metric that gets better by less is no advice
_SUMMED_UP: tuple[MetricName, ...] = ("ttft", "itl", "throughput")  # the summary names what is best for all of these
_CONFIDENT, _MUCH = 0.4, 1.2  # confidence, and times as good: with less a cause is not what the summary names
_WORTH_A_PRICE = 2.0  # times as good, of one metric alone
_ALIKE = 0.95  # of the gain of a larger change of a setting: the smaller one is taken then
_LONGER_GAP = 1.25  # the most that the longest gap between two tokens may grow by, for a better mean or p99
_MOST_DELAY = 4.0  # the most that first tokens may come later by, as a factor, for steadier streams
_FOR_P99 = 100  # observations
_ENOUGH = 20  # requests, for full confidence
_MOST_CAUSES = 5  # of a metric
_IDLE = 0.5  # share of the time without work from which there is not enough of it
_FEW_WAITING = 0.5  # requests
_SATURATED = 0.9  # share of the time that the device computes
_SLOWER = 1.25  # the most that throughput may fall by, as a factor, for the sake of a latency
_BUSY_LOOP = 0.7  # cores of a process with one event loop
_NOTICEABLE_FRONT = 0.1  # of the time to first token, or between tokens
_NOTICEABLE_IDLE = 0.1  # of a step
_GUESS = 0.3  # confidence
_SLOW_CLIENTS = 0.5  # connections,
_SLOW_SHARE = 0.2  # and as a share of the requests that run


class _Values(NamedTuple):
    """By metric; what it is made of besides the engine is in `front`, and no setting of the scheduler changes it."""

    engine: dict[MetricName, float]
    front: float


@dataclass(frozen=True, slots=True)
class _Effect:
    change: Change
    predicted: dict[MetricName, float]
    longest_gap: float  # between two tokens: times as long


def diagnose(
    engine: Engine, facts: Facts, cost: CostModel, cpu: Cpu, unix_time: float
) -> Generator[None, None, Diagnosis]:
    """Yields between pieces of work of about a millisecond."""
    measured = _measured(facts, cpu)
    causes: dict[MetricName, list[Cause]] = {name: [] for name in measured.engine}
    if facts.load.jobs and cost.ready:
        setup = setup_of(engine, cost, facts.overhead)
        base = yield from Replay(facts.load, setup).run()
        effects = []
        for change in Proposals(engine, facts, setup, cost):
            yield
            outcome = yield from Replay(change.load, change.setup).run()
            # Not with preemptions: then the longest gap is a matter of who loses its blocks when.
            longer = outcome.itl.most / base.itl.most if base.itl.most and not base.preemptions else 1.0
            effects.append(_Effect(change, _predicted(measured, base, outcome), longer))
        trust = _trust(facts, measured, base, cost)
        for name in causes:
            causes[name] = list(_advice(name, measured, effects, facts, trust))
    for name, found in _beyond_settings(engine, facts, cost, cpu, measured):
        causes[name].append(found)
    metrics = []
    for name, value in _values(measured).items():
        parts = _parts(name, facts, cost, cpu)
        # The client first: what it does not read, nothing else makes faster.
        ranked = sorted(
            causes[name], key=lambda cause: (cause.cause != "client", -_factor(name, value, cause.predicted))
        )
        rest = _rest(name, value, parts, facts, cpu) if cost.ready else _too_early(value)
        metrics.append(DiagnosedMetric(name, value, parts, tuple(ranked[:_MOST_CAUSES] or [rest])))
    return Diagnosis(
        unix_time,
        facts.seconds,
        facts.arrived,
        facts.finished,
        _measures(facts, cpu),
        tuple(metrics),
        _summary(facts, metrics, cost),
    )


def _measured(facts: Facts, cpu: Cpu) -> _Values:
    values: dict[MetricName, float] = {}
    if facts.first_tokens:
        values["ttft"] = facts.ttft.mean
        if facts.first_tokens >= _FOR_P99:
            values["ttft_p99"] = facts.ttft.p99
    if facts.itl.mean:
        values["itl"] = facts.itl.mean
        if facts.steps.decode_rows >= _FOR_P99:
            values["itl_p99"] = facts.itl.p99
    if facts.throughput:
        values["throughput"] = facts.throughput
    if facts.running:
        values["concurrency"] = facts.running
    return _Values(values, cpu.front)


def _values(measured: _Values) -> dict[MetricName, float]:
    return {
        name: value + (measured.front if name in ("ttft", "ttft_p99") else 0.0)
        for name, value in measured.engine.items()
    }


def _of(outcome: Outcome, name: MetricName) -> float:
    match name:
        case "ttft":
            return outcome.ttft.mean
        case "ttft_p99":
            return outcome.ttft.p99
        case "itl":
            return outcome.itl.mean
        case "itl_p99":
            return outcome.itl.p99
        case "throughput":
            return outcome.throughput
        case "concurrency":
            return outcome.running


def _predicted(measured: _Values, base: Outcome, outcome: Outcome) -> dict[MetricName, float]:
    values: dict[MetricName, float] = {}
    for name, value in measured.engine.items():
        before = _of(base, name)
        after = value * _of(outcome, name) / before if before > 0 else value
        values[name] = after + (measured.front if name in ("ttft", "ttft_p99") else 0.0)
    return values


def _factor(name: MetricName, before: float, after: float) -> float:
    """How many times as good it is."""
    if before <= 0 or after <= 0:
        return 1.0
    return after / before if name in HIGHER_IS_BETTER else before / after


def _is_worth_it(name: MetricName, values: dict[MetricName, float], effect: _Effect) -> bool:
    """Whether a latency is not bought with throughput, its mean not with its p99, nor steadier streams with first
    tokens that are later still, or with fewer stalls that are longer."""
    predicted = effect.predicted
    if name in HIGHER_IS_BETTER:
        return True

    def lost(other: MetricName) -> float:
        return 1 / _factor(other, values[other], predicted[other]) if other in values else 1.0

    gained = _factor(name, values[name], predicted[name])
    if lost("throughput") > _SLOWER or lost(_SIBLINGS[name]) > gained:
        return False
    if name in ("ttft", "ttft_p99"):
        return True
    return lost("ttft") <= min(gained, _MOST_DELAY) and effect.longest_gap <= _LONGER_GAP


def _trust(facts: Facts, measured: _Values, base: Outcome, cost: CostModel) -> dict[MetricName, float]:
    """How far predictions of each metric are to be believed, before what the kind of change deserves."""
    enough = min(1.0, len(facts.load.jobs) / _ENOUGH)
    trust: dict[MetricName, float] = {}
    for name, value in measured.engine.items():
        error = abs(_of(base, name) / value - 1)
        trust[name] = enough * max(0.0, 1 - error) * max(0.0, 1 - cost.relative_error)
    return trust


def _advice(
    name: MetricName,
    measured: _Values,
    effects: Sequence[_Effect],
    facts: Facts,
    trust: dict[MetricName, float],
) -> Iterable[Cause]:
    """The best change of each setting, where it gains anything."""
    if name == "concurrency" and facts.waiting < _FEW_WAITING:
        return
    values = _values(measured)
    best: dict[tuple[str, CauseName], tuple[float, _Effect]] = {}
    for effect in effects:
        key = effect.change.setting, effect.change.cause
        gain = math.log(_factor(name, values[name], effect.predicted[name]))
        worth = gain >= _LEAST_GAIN and _is_worth_it(name, values, effect)
        if worth and (key not in best or _ALIKE * gain > best[key][0]):
            best[key] = gain, effect
    for _, effect in best.values():
        change = effect.change
        yield Cause(
            change.cause,
            evidence.of(change, facts),
            change.setting,
            change.before,
            change.after,
            effect.predicted[name],
            round(trust[name] * change.trust, 3),
            tuple((other, value) for other, value in effect.predicted.items() if other != name),
        )


# --- what no setting of the scheduler changes ---


def _beyond_settings(
    engine: Engine, facts: Facts, cost: CostModel, cpu: Cpu, measured: _Values
) -> Iterable[tuple[MetricName, Cause]]:
    values = _values(measured)
    yield from _of_front(engine, cpu, values)
    idle = facts.empty > _IDLE and facts.waiting < _FEW_WAITING
    if "throughput" in values and idle and facts.load.jobs and cost.ready:
        most = _capacity(facts, setup_of(engine, cost, facts.overhead))
        yield (
            "throughput",
            Cause("load", evidence.load(facts), predicted=max(most, values["throughput"]), confidence=0.6),
        )
    yield from _of_scheduler(facts, cpu, values)
    if cpu.slow_clients > max(_SLOW_CLIENTS, _SLOW_SHARE * facts.running):
        for name in ("itl", "throughput"):
            if name in values:
                yield name, Cause("client", evidence.clients(cpu), predicted=values[name], confidence=0.7)


def _of_front(engine: Engine, cpu: Cpu, values: dict[MetricName, float]) -> Iterable[tuple[MetricName, Cause]]:
    """More processes share the waiting for them; what each piece of work takes stays.

    A loop that is late although its process has little to do waits for a processor: more processes would wait as well.
    First tokens wait for prompts to be encoded and for loops; tokens after them for loops alone, of which the engine's
    time between tokens knows nothing: it becomes as many times as good as that time and the lateness together.
    """
    tokenizers, frontends = engine.config.tokenizer.tokenizers, engine.config.server.frontends
    tokenizer_lag = 2 * cpu.tokenizer_lag if cpu.tokenizer_cores > _BUSY_LOOP else 0.0
    frontend_lag = 2 * cpu.frontend_lag if cpu.frontend_cores > _BUSY_LOOP else 0.0
    waited = cpu.encode_wait + cpu.child_wait + tokenizer_lag
    firsts: tuple[MetricName, ...] = ("ttft", "ttft_p99")
    gaps: tuple[MetricName, ...] = ("itl", "itl_p99")
    for setting, count, lag, wait, on_firsts, on_gaps in (
        ("--tokenizers", tokenizers, tokenizer_lag, waited, evidence.front(cpu), evidence.detokenizing(cpu)),
        ("--frontends", frontends, frontend_lag, frontend_lag, evidence.http(cpu), evidence.http(cpu)),
    ):
        if not engine.takes(setting, str(2 * count)):
            continue
        for name in firsts:
            if name in values and wait > _NOTICEABLE_FRONT * values[name]:
                # No more than the waiting is part of it: means of prompts and of requests may be of other ones.
                after = values[name] - min(wait, values[name]) / 2
                yield name, Cause("cpu", on_firsts, setting, str(count), str(2 * count), after, 0.5)
        for name in gaps:
            if name in values and lag > _NOTICEABLE_FRONT * values[name]:
                after = values[name] * (values[name] + lag / 2) / (values[name] + lag)
                yield name, Cause("cpu", on_gaps, setting, str(count), str(2 * count), after, _GUESS)


def _of_scheduler(facts: Facts, cpu: Cpu, values: dict[MetricName, float]) -> Iterable[tuple[MetricName, Cause]]:
    """It has one event loop, and no setting gives it another."""
    idle = facts.overhead * facts.steps.steps / max(1e-9, facts.steps.seconds)  # share of steps
    if cpu.scheduler_cores <= _BUSY_LOOP or idle <= _NOTICEABLE_IDLE:
        return
    text = evidence.scheduler(cpu, facts)
    if "itl" in values:
        yield "itl", Cause("cpu", text, predicted=values["itl"] * (1 - idle), confidence=0.5)
    # Where requests come at their times and find a place, as many tokens are wanted as before.
    if "throughput" in values and (facts.load.clients or facts.waiting >= _FEW_WAITING):
        yield "throughput", Cause("cpu", text, predicted=values["throughput"] / max(0.1, 1 - idle), confidence=0.5)


def _capacity(facts: Facts, setup: Setup) -> float:
    """Output tokens a second with as many requests as can run at once, each of the mean length."""
    jobs = facts.load.jobs
    length = math.fsum(job.prompt + job.outputs / 2 for job in jobs) / len(jobs)
    outputs = math.fsum(job.outputs for job in jobs) / len(jobs)
    computed = math.fsum(job.prompt - job.cached for job in jobs) / len(jobs)
    rows = max(1, min(setup.max_seqs, int(setup.num_blocks * setup.block_size / (length + outputs / 2))))
    cost = CostModel.from_coefficients(growing_cost(setup.cost, facts))
    decode = cost.predict(StepShape(decode_rows=rows, context_tokens=round(rows * length))) + setup.overhead
    prompts = cost.predict(StepShape().with_chunk(0, round(computed))) - setup.cost[0]
    return rows * outputs / (outputs * decode + rows * prompts)


def _too_early(value: float) -> Cause:
    """Before the engine knows what steps cost, it knows of no setting what it would change."""
    return Cause("device", evidence.TOO_EARLY, predicted=value, confidence=0.0)


def _rest(name: MetricName, value: float, parts: tuple[tuple[str, float], ...], facts: Facts, cpu: Cpu) -> Cause:
    """What a metric is mostly made of, where no setting was found that would change it."""
    largest = max(parts, key=lambda part: part[1], default=("", 0.0))[0]
    cause: CauseName = "device"
    text = evidence.device(facts)
    if name in ("throughput", "concurrency"):
        if facts.waiting < _FEW_WAITING and facts.busy < _SATURATED:
            cause, text = "load", evidence.load(facts)
    elif name in ("ttft", "ttft_p99"):
        if largest == OWN_PROMPT:
            cause, text = "prefill", evidence.prompts(facts)
        elif largest == FRONT:
            cause, text = "cpu", evidence.late(cpu)
    elif largest in (WEIGHTS, CONTEXT):
        cause, text = "decode", f"{largest}: most of {evidence.milliseconds(facts.itl.mean)} between two tokens; {text}"
    return Cause(cause, text, predicted=value, confidence=0.6)


# --- numbers for people ---


def _parts(name: MetricName, facts: Facts, cost: CostModel, cpu: Cpu) -> tuple[tuple[str, float], ...]:
    match name:
        case "ttft" | "ttft_p99":
            waits = [(f"queue: {limit}", share * facts.queue) for limit, share in facts.limits.items()]
            return (
                (FRONT, cpu.front),
                *(waits or [("queue", facts.queue)]),
                (OWN_PROMPT, facts.own),
                ("others in the same steps, and gaps", facts.others),
            )
        case "itl" | "itl_p99":
            return _step_parts(facts, cost)
        case "throughput":
            seconds = facts.seconds
            idle = max(0.0, facts.steps.seconds - facts.steps.busy)
            return (
                ("device busy", facts.busy),
                ("between steps", idle / seconds),
                ("requests but no step", facts.starved),
                ("no requests", facts.empty),
            )
        case "concurrency":
            return tuple((limit, value / facts.seconds) for limit, value in facts.steps.limits.items())


def _step_parts(facts: Facts, cost: CostModel) -> tuple[tuple[str, float], ...]:
    """What of the mean gap is what of the mean step."""
    step, token, row, context, pair = cost.coefficients
    total, count = facts.steps, max(1, facts.steps.steps)
    parts = (
        (WEIGHTS, step),
        ("requests in the batch", row * total.decode_rows / count),
        (CONTEXT, context * total.context_tokens / count),
        ("prompts in the same steps", (token * total.prefill_tokens + pair * total.prefill_context) / count),
        ("between steps", facts.overhead),
    )
    whole = math.fsum(seconds for _, seconds in parts)
    return tuple((name, facts.itl.mean * seconds / whole) for name, seconds in parts) if whole else ()


def _measures(facts: Facts, cpu: Cpu) -> tuple[tuple[str, float], ...]:
    return (
        ("device_busy", facts.busy),
        ("empty", facts.empty),
        ("starved", facts.starved),
        ("running", facts.running),
        ("waiting", facts.waiting),
        ("kv_usage", facts.kv_share),
        ("preemptions", facts.totals.preemptions),
        ("recomputed_tokens", facts.totals.recomputed_tokens),
        ("refused", facts.totals.refused),
        ("aborted", facts.totals.aborted),
        ("clients", facts.load.clients),
        ("prompt_tokens_mean", facts.prompt),
        ("cached_tokens_mean", facts.cached),
        ("repeated_tokens_mean", facts.repeated),
        ("output_tokens_p50", facts.outputs[0]),
        ("output_tokens_p90", facts.outputs[1]),
        ("output_tokens_max", facts.outputs[2]),
        ("length_finishes", facts.length_share),
        ("tokenizer_cores", cpu.tokenizer_cores),
        ("frontend_cores", cpu.frontend_cores),
        ("scheduler_cores", cpu.scheduler_cores),
        ("worker_cores", cpu.worker_cores),
        ("detokenize_cores", cpu.detokenize_cores),
        ("front_seconds", cpu.front),
    )


def _summary(facts: Facts, metrics: Sequence[DiagnosedMetric], cost: CostModel) -> str:
    if not facts.arrived and not facts.steps.steps:
        return "no requests: there is nothing to diagnose"
    if facts.empty > _IDLE and facts.waiting < _FEW_WAITING:
        return f"not enough load: {evidence.load(facts)}"
    for metric in metrics:
        if metric.causes[0].cause == "client":
            return f"the clients are what is slow: {metric.causes[0].evidence}"
    values = {metric.name: metric.value for metric in metrics}
    best: tuple[float, DiagnosedMetric, Cause] | None = None
    for metric in metrics:
        for cause in metric.causes:
            factor = _factor(metric.name, metric.value, cause.predicted)
            if not cause.setting or cause.confidence < _CONFIDENT or factor < _MUCH:
                continue
            after = dict(cause.effects) | {metric.name: cause.predicted}
            gains = [math.log(_factor(name, values[name], after[name])) for name in _SUMMED_UP if name in after]
            score = cause.confidence * math.fsum(gains)
            if score > (best[0] if best else 0.0):
                best = score, metric, cause
    if best is None:
        if not cost.ready:
            return evidence.TOO_EARLY
        return _summary_of_one(metrics) or f"no setting would help much: {evidence.device(facts)}"
    _, metric, cause = best
    return f"{metric.name} is bound by {cause.cause}: {cause.evidence}; try {evidence.flag(cause.setting, cause.after)}"


def _summary_of_one(metrics: Sequence[DiagnosedMetric]) -> str:
    """Of the metric that has most to gain, where nothing is better for all; empty: of none, it is too little."""
    values = {metric.name: metric.value for metric in metrics}
    found = [
        (_factor(metric.name, metric.value, cause.predicted), metric, cause)
        for metric in metrics
        for cause in metric.causes[:1]
        if cause.confidence >= _CONFIDENT
    ]
    factor, metric, cause = max(found, key=lambda one: one[0], default=(1.0, None, None))
    if metric is None or cause is None or factor < (_WORTH_A_PRICE if cause.setting else _MUCH):
        return ""
    text = f"{metric.name} is bound by {cause.cause}: {cause.evidence}"
    if not cause.setting:
        return text
    lost = {name: 1 / _factor(name, values[name], value) for name, value in cause.effects}
    price = [f"{name} {by:.1f} times as bad" for name, by in lost.items() if by > _MUCH]
    effect = ", and ".join([f"would make it {factor:.1f} times as good", *price])
    return f"{text}; {evidence.flag(cause.setting, cause.after)} {effect}"
