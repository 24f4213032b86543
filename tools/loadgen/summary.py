"""From records to the numbers of the report. Definitions: section 8 of the design, `tools.loadgen.latencies`."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from tools.loadgen.lag import ClientLoad, Flights, Limits, WorkerLoad, client_load
from tools.loadgen.latencies import Latencies, ServerLatencies, latencies_of, server_latencies
from tools.loadgen.messages import Outcome, Record
from tools.loadgen.slo import Slo
from tools.reports.percentiles import Floats, Interval, grouped_interval, order_interval, percentile, share_interval

PERCENTILES = (50, 90, 99)
_AGREEMENT_SECONDS, _AGREEMENT_SHARE = 2e-3, 0.02
_LISTED_FAILURES = 20


class Estimate(Struct, frozen=True):
    """A percentile and its 95% interval; None: n sets no bound there."""

    value: float
    low: float | None
    high: float | None


class Spread(Struct, frozen=True):
    """Seconds; None where n does not support it."""

    n: int
    mean: float | None
    p50: Estimate | None
    p90: Estimate | None
    p99: Estimate | None


class Failure(Struct, frozen=True):
    id: str
    outcome: Outcome
    detail: str


class Exactness(Struct, frozen=True):
    """Tokens that the server counted, against those that were asked for."""

    compared: int
    exact: int
    differences: dict[int, int]  # counted - asked: how many requests; of those that differ


class Goodput(Struct, frozen=True):
    """Of the measured requests; failures are misses. `share` with its 95% interval; `rate`: requests a second."""

    slo: Slo
    met: int
    share: float
    share_low: float
    share_high: float
    rate: float
    unknown: int = 0  # misses for want of what the server does not tell: how many tokens came when


class Difference(Struct, frozen=True):
    """What the client saw minus what the server says, in seconds. `agree`: within 2 ms or 2% of the server's."""

    n: int
    p50: float
    p99: float
    largest: float
    agree: int


class Agreement(Struct, frozen=True):
    """By request id. TTFT from the sending; the server does not know when the request was due."""

    joined: int
    ttft: Difference | None
    tpot: Difference | None
    itl: Difference | None  # means over each request
    preemptions: int


class Summary(Struct, frozen=True, kw_only=True):
    """All numbers of one run. Seconds; requests and tokens a second."""

    # Of the measured requests, from the first due time to the last one, or to the last token of what was answered.
    seconds: float
    sent: int
    measured: int
    offered_rate: float
    outcomes: dict[Outcome, int]  # of the measured requests
    failures: list[Failure]  # the first ones, of all
    ttft: Spread
    tpot: Spread
    itl: Spread
    icl: Spread
    queue: Spread
    e2e: Spread
    output_tokens: int
    output_throughput: float
    prompt_throughput: float
    cached_share: float | None  # of prompt tokens, as the server says
    prompt_exact: Exactness
    output_exact: Exactness
    uncounted: int  # answers without tokens per chunk: they have no ITL
    miscounted: int  # answers whose chunks have other tokens than their usage says
    goodput: Goodput | None
    client: ClientLoad
    agreement: Agreement | None


def summarize(
    records: Sequence[Record],
    *,
    workers: Sequence[WorkerLoad],
    limits: Limits,
    slo: Slo | None,
    added_tokens: int,
) -> Summary:
    """`added_tokens`: what the server puts around each prompt that is made of a number of tokens."""
    measured = [record for record in records if record.measured and record.outcome != "cancelled"]
    answered = [record for record in measured if record.outcome == "ok"]
    found = [latencies_of(record) for record in answered]
    server = [server_latencies(record.timings) if record.timings else None for record in answered]
    begin = min((record.scheduled for record in measured), default=0.0)
    span = max((record.scheduled for record in measured), default=0.0) - begin
    # What failed has no tokens in the throughput, and so its end, as by a timeout, is not in the time either.
    seconds = max(span, max((record.times[-1] for record in answered), default=begin) - begin)
    # n arrivals are n - 1 gaps.
    offered = (len(measured) - 1) / span if span > 0 else 0.0
    tokens = sum(latencies.tokens or 0 for latencies in found)
    prompts = [record for record in answered if record.prompt_tokens is not None]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in prompts)
    said = [record for record in prompts if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in said)
    return Summary(
        seconds=seconds,
        sent=len(records),
        measured=len(measured),
        offered_rate=offered,
        outcomes=dict(Counter(record.outcome for record in measured)),
        failures=[
            Failure(record.id, record.outcome, record.detail)
            for record in records
            if record.outcome not in ("ok", "cancelled")
        ][:_LISTED_FAILURES],
        ttft=_spread([latencies.ttft for latencies in found]),
        tpot=_spread([latencies.tpot for latencies in found]),
        itl=_grouped_spread([latencies.itl for latencies in found]),
        icl=_grouped_spread([latencies.icl for latencies in found]),
        queue=_spread([latencies.queue for latencies in server if latencies is not None]),
        e2e=_spread([latencies.e2e for latencies in found]),
        output_tokens=tokens,
        output_throughput=tokens / seconds if seconds else 0.0,
        prompt_throughput=prompt_tokens / seconds if seconds else 0.0,
        cached_share=cached / max(1, sum(record.prompt_tokens or 0 for record in said)) if said else None,
        prompt_exact=_exactness(
            [
                record.prompt_tokens - added_tokens - record.input_length
                for record in prompts
                if record.input_length and record.prompt_tokens is not None
            ]
        ),
        output_exact=_exactness(
            [
                record.completion_tokens - record.output_length
                for record in answered
                if record.output_length and record.completion_tokens is not None
            ]
        ),
        uncounted=sum(not record.tokens for record in answered),
        miscounted=sum(
            bool(record.tokens)
            and record.completion_tokens is not None
            and sum(record.tokens) != record.completion_tokens
            for record in answered
        ),
        goodput=None if slo is None else _goodput(slo, found, len(measured), offered, seconds),
        client=client_load(
            np.array([record.sent - record.scheduled for record in measured]), _flights(measured), workers, limits
        ),
        agreement=_agreement(answered, found, server),
    )


def _flights(measured: Sequence[Record]) -> Flights:
    """From when each was due to its last token: in what one waits for in vain the client has nothing to do."""
    flights = Flights([(record.scheduled, record.times[-1]) for record in measured if record.times])
    if flights.seconds or not measured:
        return flights
    # Not one token came. Whether the client was to blame is to be seen while they were to be sent and refused.
    return Flights([(record.scheduled, record.ended) for record in measured])


def _goodput(slo: Slo, found: Sequence[Latencies], measured: int, offered: float, seconds: float) -> Goodput:
    met = sum(slo.met(latencies) for latencies in found)
    interval = share_interval(met, measured)
    share = met / measured if measured else 0.0
    rate = offered * share if offered else met / seconds if seconds else 0.0
    unknown = sum(not slo.is_known(latencies) for latencies in found)
    return Goodput(slo, met, share, interval.low or 0.0, interval.high or 0.0, rate, unknown)


def _estimate(values: Floats, percent: int, interval: Callable[[int], Interval]) -> Estimate | None:
    value = percentile(values, percent)
    if value is None:
        return None
    bounds = interval(percent)
    return Estimate(value, bounds.low, bounds.high)


def _spread(values: Sequence[float | None]) -> Spread:
    """Of one value a request."""
    found = np.array([value for value in values if value is not None])
    estimates = [_estimate(found, percent, lambda percent: order_interval(found, percent)) for percent in PERCENTILES]
    return Spread(len(found), float(found.mean()) if len(found) else None, *estimates)


def _grouped_spread(groups: Sequence[Floats]) -> Spread:
    """Of several values a request, which are like each other."""
    groups = [group for group in groups if len(group)]
    if not groups:
        return Spread(0, None, None, None, None)
    values = np.concatenate(groups)
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    estimates = [
        _estimate(values, percent, lambda percent: grouped_interval(values, numbers, percent))
        for percent in PERCENTILES
    ]
    return Spread(len(values), float(values.mean()), *estimates)


def _exactness(differences: Sequence[int]) -> Exactness:
    other = Counter(difference for difference in differences if difference)
    return Exactness(len(differences), len(differences) - other.total(), dict(sorted(other.items())))


def _agreement(
    records: Sequence[Record], found: Sequence[Latencies], server: Sequence[ServerLatencies | None]
) -> Agreement | None:
    joined = [
        (record, latencies, theirs)
        for record, latencies, theirs in zip(records, found, server, strict=True)
        if theirs is not None
    ]
    if not joined:
        return None
    return Agreement(
        joined=len(joined),
        ttft=_difference([(record.times[0] - _written(record), theirs.ttft) for record, _, theirs in joined]),
        tpot=_difference([(ours.tpot, theirs.tpot) for _, ours, theirs in joined]),
        itl=_difference(
            [(float(ours.itl.mean()) if len(ours.itl) else None, theirs.tpot) for _, ours, theirs in joined]
        ),
        preemptions=sum(theirs.preemptions for _, _, theirs in joined),
    )


def _written(record: Record) -> float:
    """From when on it was the system's and the server's, as far as that is known."""
    return record.sent if record.written is None else record.written


def _difference(pairs: Sequence[tuple[float | None, float | None]]) -> Difference | None:
    known = np.array([(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None])
    if not len(known):
        return None
    differences = known[:, 0] - known[:, 1]
    distances = np.abs(differences)
    agree = distances <= np.maximum(_AGREEMENT_SECONDS, _AGREEMENT_SHARE * known[:, 1])
    p99 = percentile(distances, 99)
    return Difference(
        n=len(known),
        p50=float(np.median(differences)),
        p99=float(distances.max()) if p99 is None else p99,
        largest=float(differences[np.argmax(distances)]),
        agree=int(agree.sum()),
    )
