"""What a file in Chrome's trace event format must be: its required fields, its order, its nesting.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

_ROUNDING = 0.0015  # microseconds: two numbers of three digits that are added


@dataclass
class Span:
    """One span, with those directly inside of it. Times in microseconds."""

    name: str
    start: float
    end: float
    args: dict[str, Any]
    process: str
    inner: list["Span"] = field(default_factory=list)

    def all(self) -> "list[Span]":
        return [self, *(span for inner in self.inner for span in inner.all())]


@dataclass
class Checked:
    """A file that is as it must be."""

    tracks: dict[str, list[Span]]  # outermost complete events, by process
    overlapping: dict[str, list[Span]]  # outermost asynchronous events, by category
    instants: list[tuple[str, str, float]]  # id, name, time
    ids: dict[str, str]  # of an asynchronous span's name
    other: dict[str, Any]


def check(data: bytes) -> Checked:
    """AssertionError when it is not."""
    document = json.loads(data)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    processes: dict[int, str] = {}
    last = 0.0
    complete: dict[tuple[int, int], list[Span]] = defaultdict(list)
    open_spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    overlapping: dict[str, list[Span]] = defaultdict(list)
    instants = []
    ids = {}
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(event)
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= last, "in order of time"
        last = event["ts"]
        process = processes[event["pid"]]
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                span = Span(event["name"], event["ts"], event["ts"] + event["dur"], event["args"], process)
                complete[event["pid"], event["tid"]].append(span)
            case "b":
                span = Span(event["name"], event["ts"], -1.0, event["args"], process)
                stack = open_spans[event["cat"], event["id"]]
                (stack[-1].inner if stack else overlapping[event["cat"]]).append(span)
                if not stack:
                    ids[event["name"]] = event["id"]
                stack.append(span)
            case "e":
                span = open_spans[event["cat"], event["id"]].pop()
                assert span.name == event["name"], "the innermost ends first"
                span.end = event["ts"]
                span.args |= event["args"]
            case "n":
                assert open_spans[event["cat"], event["id"]], "inside of its span"
                instants.append((event["id"], event["name"], event["ts"]))
            case other:
                raise AssertionError(f"unknown phase {other!r}")
    assert not any(open_spans.values()), "all of them end"
    tracks: dict[str, list[Span]] = defaultdict(list)
    for spans in complete.values():
        tracks[spans[0].process] += _nested(spans)
    return Checked(dict(tracks), dict(overlapping), instants, ids, document["otherData"])


def _nested(spans: list[Span]) -> list[Span]:
    """Complete events of one thread: each lies behind the one before it, or inside of it."""
    outermost: list[Span] = []
    stack: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and span.start >= stack[-1].end - _ROUNDING:
            stack.pop()
        if stack:
            assert span.end <= stack[-1].end + _ROUNDING, f"{span} overlaps {stack[-1]}"
        (stack[-1].inner if stack else outermost).append(span)
        stack.append(span)
    return outermost
