"""A diagnosis as text for people: metric by metric, what to turn first."""

import textwrap

from frontend.diagnosis import CauseObject, DiagnosisObject, MetricObject
from ipc.stats_messages import MetricName
from scheduler_proc.diagnosis.evidence import flag

_WIDTH = 110
_NAMES: dict[MetricName, str] = {
    "ttft": "time to first token",
    "ttft_p99": "time to first token, p99",
    "itl": "time between tokens",
    "itl_p99": "time between tokens, p99",
    "throughput": "throughput",
    "concurrency": "requests that run at once",
}
_SHARES = ("throughput", "concurrency")  # metrics whose parts are shares of the time
_SMALL = 0.005  # of a metric: parts below are not worth a word


def render(diagnosis: DiagnosisObject) -> str:
    """The whole of it, in lines of at most 110 characters."""
    measures = diagnosis.measures
    paragraphs = [
        _wrapped(
            f"In the last {diagnosis.seconds:.0f} s {diagnosis.arrived} requests arrived and {diagnosis.finished} "
            f"finished; {measures['running']:.1f} ran and {measures['waiting']:.1f} waited on average. The device "
            f"computed {measures['device_busy']:.0%} of the time, and {measures['kv_usage']:.0%} of the KV blocks were "
            "in use."
        ),
        _wrapped(f"=> {diagnosis.summary}"),
    ]
    told: set[str] = set()
    paragraphs += [_metric(metric, told) for metric in diagnosis.metrics]
    if diagnosis.finished:
        paragraphs.append(
            _wrapped(
                f"Outputs: half have at most {measures['output_tokens_p50']:.0f} tokens, nine in ten at most "
                f"{measures['output_tokens_p90']:.0f}, the longest {measures['output_tokens_max']:.0f}; "
                f"{measures['length_finishes']:.0%} were cut at max_tokens."
            )
        )
    return "\n\n".join(paragraphs)


def amount(name: MetricName, value: float) -> str:
    """With its unit."""
    if name == "throughput":
        return f"{value:.4g} tokens/s"
    if name == "concurrency":
        return f"{value:.3g}"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def certainty(confidence: float) -> str:
    """In words: what can be expected of a prediction."""
    if confidence >= 0.7:
        return "sure"
    if confidence >= 0.4:
        return "likely"
    return "a guess"


def _metric(metric: MetricObject, told: set[str]) -> str:
    """`told`: the evidence that stands in the text already, once."""
    unit: MetricName = "concurrency" if metric.name in _SHARES else "itl"
    whole = 1.0 if metric.name in _SHARES else sum(metric.parts.values())
    parts = [
        f"{name} {value:.0%}" if metric.name in _SHARES else f"{name} {amount(unit, value)}"
        for name, value in sorted(metric.parts.items(), key=lambda part: -part[1])
        if value > _SMALL * whole
    ]
    head = f"{_NAMES[metric.name]}: {amount(metric.name, metric.value)}"
    if parts and not metric.name.endswith("_p99"):  # which has the parts of the mean
        head += f" ({'; '.join(parts)})"
    lines = [_wrapped(head)]
    lines += [_cause(number, metric, cause, told) for number, cause in enumerate(metric.causes, 1)]
    return "\n".join(lines)


def _cause(number: int, metric: MetricObject, cause: CauseObject, told: set[str]) -> str:
    if cause.setting is None:
        head = f"{cause.cause}: no setting would change much"
        if cause.predicted != metric.value:
            head = f"{cause.cause}: {amount(metric.name, cause.predicted)} would be possible"
    else:
        turn = f"{flag(cause.setting, cause.before or '')} -> {flag(cause.setting, cause.after or '')}"
        effect = f"{amount(metric.name, metric.value)} -> {amount(metric.name, cause.predicted)}"
        head = f"{turn}: {effect} ({certainty(cause.confidence)}; {cause.cause})"
    lines = [_wrapped(f"{number}. {head}", 2)]
    if cause.evidence not in told:
        told.add(cause.evidence)
        lines.append(_wrapped(cause.evidence, 5))
    if effects := [f"{_NAMES[name]} {amount(name, value)}" for name, value in cause.effects.items()]:
        lines.append(_wrapped(f"then: {'; '.join(effects)}", 5))
    return "\n".join(lines)


def _wrapped(text: str, indent: int = 0) -> str:
    space = " " * indent
    return textwrap.fill(text, _WIDTH, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
