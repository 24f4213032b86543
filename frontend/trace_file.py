"""What processes have told of their work, as a file for ui.perfetto.dev: JSON in Chrome's trace event format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Work that goes on one after the other is complete events ("X") on a track of its process; what overlaps (requests,
prompts being encoded) is nestable asynchronous events ("b", "e", "n") under an id of its own. Of those, each is cut to
lie behind its predecessor and inside of the one around it, as the format wants it: two steps are in flight, so a chunk
is planned while the one before it is computed.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ipc.messages import Timings
from ipc.timing_columns import chunks_of
from ipc.trace_messages import (
    Trace,
    TracedDetokenizing,
    TracedEncoding,
    TracedPlanning,
    TracedRequest,
    TracedStep,
)

_REQUESTS = "requests"
_WORKER = "worker-0"
_ORDER = ("frontend", _REQUESTS, "tokenizer", "scheduler", "worker")  # of the tracks, from above
_MAIN = 1  # thread


def trace_file(traces: Sequence[Trace], clock_offset: float) -> bytes:
    """The file. `clock_offset`: to be added to the monotonic clock for Unix time."""
    writer = _Writer(trace.process for trace in traces)
    for trace in traces:
        for item in trace.items:
            match item:
                case TracedRequest():
                    writer.request(trace.process, item)
                case TracedEncoding():
                    writer.encoding(trace.process, item)
                case TracedDetokenizing(start, end, tokens):
                    writer.span(trace.process, "detokenize", start, end, {"tokens": tokens})
                case TracedPlanning():
                    writer.planning(trace.process, item)
                case TracedStep():
                    writer.step(item)
    return writer.encode(sum(trace.lost for trace in traces), clock_offset)


class _Writer:
    """Collects events whose `ts` are seconds of the monotonic clock, and turns them into microseconds at the end.

    Likewise `dur`, which is a second moment until then, so that rounding keeps what ends together together.
    """

    def __init__(self, processes: Iterable[str]) -> None:
        names = sorted({*processes, _REQUESTS, _WORKER}, key=lambda name: (_ORDER.index(name.split("-")[0]), name))
        self._pids = {name: pid for pid, name in enumerate(names, 1)}
        self._events: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._last_step_end = 0.0

    def span(self, process: str, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        event = {"name": name, "cat": process.split("-")[0], "ph": "X", "ts": start, "dur": end, "args": args}
        self._add(event, process)

    def _add(self, event: dict[str, Any], process: str) -> None:
        event["pid"] = self._pids[process]
        event["tid"] = _MAIN
        self._events.append(event)

    def _async(self, process: str, kind: str, phase: str, name: str, at: float, key: int, **args: Any) -> None:
        self._add({"name": name, "cat": kind, "ph": phase, "ts": at, "id": str(key), "args": args}, process)

    def encoding(self, process: str, item: TracedEncoding) -> None:
        key, name = next(self._ids), f"encode {item.request_id}".strip()
        self._async(process, "encode", "b", name, item.start, key, tokens=item.tokens)
        self._async(process, "encode", "e", name, item.end, key)

    def planning(self, process: str, item: TracedPlanning) -> None:
        args = {
            f"step {step.step}": {
                "tokens": step.tokens,
                "prefill_rows": step.prefill_rows,
                "decode_rows": step.decode_rows,
            }
            for step in item.steps
        }
        name = "plan " + ", ".join(str(step.step) for step in item.steps)
        self.span(process, name, item.start, item.end, args)

    def step(self, item: TracedStep) -> None:
        """The parts of a step lie before the moment in which its result came, and none before the last result."""
        parts = (
            ("prepare", item.prepare_us),
            ("forward", item.forward_us),
            ("sample", item.sample_us),
            ("score", item.score_us),
        )
        earliest = self._last_step_end
        self._last_step_end = max(earliest, item.end)
        begin = max(earliest, item.end - sum(microseconds for _, microseconds in parts) / 1e6)
        self.span(_WORKER, f"step {item.step}", begin, item.end, {f"{name}_us": value for name, value in parts})
        end = item.end
        for name, microseconds in reversed(parts):
            start = max(begin, end - microseconds / 1e6)
            if microseconds:
                self.span(_WORKER, name, start, end, {})
            end = start

    def request(self, process: str, item: TracedRequest) -> None:
        key, name = next(self._ids), f"{item.route} {item.request_id}"
        self._async(process, "http", "b", name, item.arrival, key, request_id=item.request_id)
        if item.first_output:
            self._async(process, "http", "n", "first byte", item.first_output, key)
        self._async(process, "http", "e", name, item.ended, key, status=item.status)
        for index, timings in enumerate(item.choices):
            if timings is not None:
                self._choice(item, index, timings)

    def _choice(self, item: TracedRequest, index: int, timings: Timings) -> None:
        scheduler = timings.scheduler
        key, name = next(self._ids), f"{item.request_id} [{index}]"
        self._async(
            _REQUESTS, "request", "b", name, item.arrival, key, request_id=item.request_id, choice=index,
            steps=scheduler.steps, preemptions=scheduler.preemptions,
        )  # fmt: skip
        cursor = item.arrival
        chunks = chunks_of(scheduler)
        phases: list[tuple[str, float, float, dict[str, Any]]] = [
            ("tokenize", timings.received, timings.tokenized, {}),
            ("queue", scheduler.queued, scheduler.first_scheduled, {}),
            *(_prefill(chunk) for chunk in chunks if chunk[1] <= scheduler.first_token),
        ]
        for phase, start, end, args in phases:
            cursor = self._phase(key, phase, max(cursor, start), end, args)
        decoding = max(cursor, scheduler.first_token)
        self._async(_REQUESTS, "request", "b", "decode", decoding, key)
        cursor = decoding
        for again, start, end, args in (_prefill(chunk) for chunk in chunks if chunk[1] > scheduler.first_token):
            cursor = self._phase(key, again, max(cursor, start), end, args)
        cursor = max(cursor, scheduler.last_token)
        self._async(_REQUESTS, "request", "e", "decode", cursor, key)
        self._async(_REQUESTS, "request", "e", name, max(cursor, timings.finished), key)

    def _phase(self, key: int, name: str, start: float, end: float, args: dict[str, Any]) -> float:
        end = max(start, end)
        self._async(_REQUESTS, "request", "b", name, start, key, **args)
        self._async(_REQUESTS, "request", "e", name, end, key)
        return end

    def encode(self, lost: int, clock_offset: float) -> bytes:
        origin = min((event["ts"] for event in self._events), default=0.0)
        for event in self._events:
            event["ts"] = round((event["ts"] - origin) * 1e6, 3)
            if "dur" in event:
                event["dur"] = round(round((event["dur"] - origin) * 1e6, 3) - event["ts"], 3)
        self._events.sort(key=lambda event: event["ts"])  # stable: what encloses stays before what it encloses
        names = [
            {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": _MAIN, "args": args}
            for process, pid in self._pids.items()
            for name, args in (
                ("process_name", {"name": process}),
                ("process_sort_index", {"sort_index": pid}),
                ("thread_name", {"name": "main"}),
            )
        ]
        file = {
            "traceEvents": names + self._events,
            "displayTimeUnit": "ms",
            "otherData": {"unix_seconds_of_ts_0": origin + clock_offset, "lost": lost},
        }
        return msgspec.json.encode(file)


def _prefill(chunk: tuple[float, float, int]) -> tuple[str, float, float, dict[str, Any]]:
    start, end, tokens = chunk
    return "prefill", start, end, {"tokens": tokens}
