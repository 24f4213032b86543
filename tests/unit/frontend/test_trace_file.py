"""Files of traces: valid in their format, and true to what the processes said."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.trace_file import trace_file
from ipc.codec import pack_ints
from ipc.messages import ChoiceTimings, Timings
from ipc.timing_columns import chunks_of
from ipc.trace_messages import (
    PlannedStep,
    Trace,
    TracedDetokenizing,
    TracedEncoding,
    TracedPlanning,
    TracedRequest,
    TracedStep,
)
from tests.chrome_trace import check

OFFSET = 1e9


def timings_of(rng: random.Random, start: float) -> Timings:
    """As the engine tells them: each moment at or behind the one before, two steps in flight, perhaps a preemption."""

    def later(moment: float) -> float:
        return moment + rng.choice([0.0, 1e-7, 0.001, rng.random()])

    received = later(start)
    tokenized = later(received)
    queued = later(tokenized)
    scheduled = planned = later(queued)
    chunks: list[tuple[float, float, int]] = []
    moment = scheduled
    for _ in range(rng.randint(1, 4)):
        moment = later(moment)
        chunks.append((planned, moment, rng.randint(1, 9)))
        planned = rng.choice([planned, moment])
    first_token = moment
    preemptions = rng.randint(0, 2)
    for _ in range(preemptions):
        planned = later(moment)
        moment = later(planned) + 1e-6
        chunks.append((planned, moment, rng.randint(1, 9)))
    last_token = later(moment)
    starts, ends, tokens = zip(*chunks, strict=True)
    columns = array("d", starts).tobytes(), array("d", ends).tobytes(), pack_ints(tokens)
    scheduler = ChoiceTimings(queued, scheduled, first_token, last_token, 9, preemptions, *columns)
    return Timings(OFFSET, received, tokenized, later(last_token), scheduler)


def traces_of(rng: random.Random) -> list[Trace]:
    requests = []
    for number in range(rng.randint(0, 5)):
        arrival = 1000.0 + rng.random()
        choices = tuple(rng.choice([None, timings_of(rng, arrival)]) for _ in range(rng.randint(1, 3)))
        last = max((choice.finished for choice in choices if choice is not None), default=arrival)
        first = rng.choice([0.0, last])
        requests.append(TracedRequest(f"r{number}", "/v1/x", "finished", arrival, first, last + rng.random(), choices))
    detokenized, planned, steps = [], [], []
    moment = 1000.0
    for number in range(rng.randint(0, 20)):
        begun, moment = moment + rng.random() / 100, moment + rng.random() / 10 + 0.01
        detokenized.append(TracedDetokenizing(begun, moment, number))
        planned.append(TracedPlanning(begun, moment, (PlannedStep(number, 9, 1, 2),)))
        # What a rank says of its times may be longer than what has passed since the last result.
        steps.append(TracedStep(number, moment, *(rng.randint(0, 60_000) for _ in range(4))))
    encoded = [TracedEncoding(f"r{number}", 1000.0, 1000.0 + rng.random(), number) for number in range(3)]
    return [
        Trace("frontend-0", tuple(requests), 1),
        Trace("scheduler-0", (*planned, *steps), 2),
        Trace("tokenizer-0", tuple(encoded), 0),
        Trace("tokenizer-1", tuple(detokenized), 0),
    ]


@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=200, deadline=None)
def test_a_file_is_valid_and_says_what_the_processes_said(seed: int) -> None:
    traces = traces_of(random.Random(seed))
    file = check(trace_file(traces, OFFSET))
    assert file.other["lost"] == 3
    requests, (plans, steps), encoded, detokenized = (
        traces[0].items,
        (traces[1].items[: len(traces[3].items)], traces[1].items[len(traces[3].items) :]),
        traces[2].items,
        traces[3].items,
    )
    origin = file.other["unix_seconds_of_ts_0"] - OFFSET

    def at(moment: float) -> object:
        return pytest.approx((moment - origin) * 1e6, abs=1)  # Unix time in a float is good for less than that

    assert [span.name for span in file.tracks.get("worker-0", ())] == [f"step {step.step}" for step in steps]  # type: ignore[union-attr]
    for span, step in zip(file.tracks.get("worker-0", ()), steps, strict=True):
        assert isinstance(step, TracedStep)
        assert span.end == at(step.end)
        names = [inner.name for inner in span.inner]
        assert names == [name for name in ("prepare", "forward", "sample", "score") if name in names]
        assert sum(inner.end - inner.start for inner in span.inner) == pytest.approx(span.end - span.start, abs=0.1)
    for span, plan in zip(file.tracks.get("scheduler-0", ()), plans, strict=True):
        assert isinstance(plan, TracedPlanning)
        assert (span.start, span.end) == (at(plan.start), at(plan.end))
        assert span.args == {f"step {plan.steps[0].step}": {"tokens": 9, "prefill_rows": 1, "decode_rows": 2}}
    assert len(file.tracks.get("tokenizer-1", ())) == len(detokenized)
    assert len(file.overlapping.get("encode", ())) == len(encoded)
    assert len(file.overlapping.get("http", ())) == len(requests)
    told = [
        (request, index, choice)
        for request in requests
        if isinstance(request, TracedRequest)
        for index, choice in enumerate(request.choices)
        if choice is not None
    ]
    shown = {span.name: span for span in file.overlapping.get("request", ())}
    assert set(shown) == {f"{request.request_id} [{index}]" for request, index, _ in told}
    for request, index, timings in told:
        scheduler, span = timings.scheduler, shown[f"{request.request_id} [{index}]"]
        assert (span.start, span.end) == (at(request.arrival), at(timings.finished))
        tokenize, queue, *prefills, decode = span.inner
        assert [inner.name for inner in span.inner] == ["tokenize", "queue", *["prefill"] * len(prefills), "decode"]
        assert (tokenize.start, tokenize.end) == (at(timings.received), at(timings.tokenized))
        assert (queue.start, queue.end) == (at(scheduler.queued), at(scheduler.first_scheduled))
        assert (decode.start, decode.end) == (at(scheduler.first_token), at(scheduler.last_token))
        drawn = prefills + decode.inner
        chunks = chunks_of(scheduler)
        assert [chunk.args["tokens"] for chunk in drawn] == [tokens for _, _, tokens in chunks]
        assert [chunk.end for chunk in drawn] == [at(end) for _, end, _ in chunks]
        for chunk, (start, _, _), before in zip(drawn, chunks, [chunks[0], *chunks], strict=False):
            assert chunk.start == at(start if before is chunks[0] and chunk is drawn[0] else max(start, before[1]))


def test_without_anything_it_is_still_a_file() -> None:
    file = check(trace_file([], OFFSET))
    assert (file.tracks, file.overlapping) == ({}, {})
