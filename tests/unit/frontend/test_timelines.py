"""What a frontend keeps of requests that have ended, and no more than that."""

import gc
import time
import weakref
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from frontend.errors import ApiError
from frontend.timelines import RequestTimeline, Timelines
from ipc.messages import Finished

END = Finished(1, 0, "length", None, 5, 4, 3)


class Body:
    """Stands for all that a handler has at hand."""


def test_a_failure_keeps_nothing_of_the_request_alive() -> None:
    timeline = RequestTimeline("x", time.monotonic(), 1, {})

    def handler() -> "weakref.ref[Body]":
        body = Body()
        try:
            raise ApiError(429, "the queue is full", code="queue_full")
        except ApiError as error:
            timeline.fail(error)
        return weakref.ref(body)

    body = handler()
    gc.collect()
    assert body() is None
    timeline.end("/v1/completions")
    record = timeline.record()
    assert record.error is not None
    assert (record.status, record.error.status, record.error.code) == ("failed", 429, "queue_full")


def test_an_engine_that_tells_no_times() -> None:
    timeline = RequestTimeline("x", time.monotonic(), 2, {1: END})
    timings = timeline.timings()
    assert timings.tokenized_ms is None
    [choice] = timings.choices
    assert (choice.index, choice.queued_ms, choice.first_token_ms, choice.finished_ms) == (1, None, None, None)
    assert (choice.prefill_chunks, choice.steps) == ([], 0)
    assert (choice.cached_tokens, choice.prompt_tokens, choice.completion_tokens) == (3, 5, 4)
    assert timeline.status == "aborted", "one of two choices has not finished"


@given(
    size=st.integers(0, 5),
    names=st.lists(st.sampled_from("abcdefgh"), max_size=30),
    limit=st.integers(1, 8),
)
def test_the_last_ones_are_kept_by_name(size: int, names: list[str], limit: int) -> None:
    timelines = Timelines(size)
    expected: OrderedDict[str, RequestTimeline] = OrderedDict()
    for name in names:
        timeline = RequestTimeline(name, 1.0, 1, {0: END})
        timelines.add(timeline)
        expected[name] = timeline
        expected.move_to_end(name)
    last = list(reversed(expected.values()))[:size]
    assert timelines.newest(limit) == last[:limit]
    for name in "abcdefgh":
        assert timelines.get(name) is (expected.get(name) if expected.get(name) in last else None)
