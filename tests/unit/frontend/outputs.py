"""What the tests of the renderers share: outputs of random pieces, and a parser that just passes pieces on."""

import json
from typing import Any

from hypothesis import strategies as st

from frontend.generation import Batch
from frontend.pieces import OutputParser, Piece, Reasoning, Text, ToolArguments, ToolCallBegin
from frontend.protocol import PromptTokensDetails, Usage
from ipc.codec import pack_ints
from ipc.messages import Delta, Finished, FinishReason

USAGE = Usage(10, 6, 16, PromptTokensDetails(4))


class Scripted(OutputParser):
    """Has a list of pieces for each push, and one for the end."""

    def __init__(self, script: list[list[Piece]]) -> None:
        self._script = list(script)

    def push(self, text: str) -> list[Piece]:
        return self._script.pop(0)

    def finish(self) -> list[Piece]:
        return [piece for pieces in self._script for piece in pieces]


def delta(text: str = "x") -> Delta:
    return Delta(1, 0, text, pack_ints([7]), prompt_tokens=10)


def finished(reason: FinishReason = "stop", stop_reason: str | int | None = None) -> Finished:
    return Finished(1, 0, reason, stop_reason, 10, 6, 4)


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Piece]]:
    """Pieces as parsers may give them: text and reasoning in any order, calls numbered, arguments behind their call."""
    pieces: list[Piece] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        texts = draw(st.lists(st.text(max_size=4), max_size=3))
        if kind == "call":
            pieces.append(ToolCallBegin(calls, f"call_{calls}", f"tool{calls}"))
            arguments = json.dumps(draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3))))
            cut = draw(st.integers(0, len(arguments)))
            pieces += [ToolArguments(calls, arguments[:cut]), ToolArguments(calls, arguments[cut:])]
            calls += 1
        else:
            pieces += [Text(text) if kind == "text" else Reasoning(text) for text in texts]
    script: list[list[Piece]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            script.append([])
        script[-1].append(piece)
    return script


def batches(draw: st.DrawFn, script: list[list[Piece]], end: Finished) -> list[Batch]:
    """A delta for each entry but the last, and the end; cut into batches at random."""
    items: list[Delta | Finished] = [*(delta() for _ in script[:-1]), end]
    found: list[Batch] = [[]]
    for item in items:
        if found[-1] and draw(st.booleans()):
            found.append([])
        found[-1].append((0, item))
    return found


def blocks_of(script: list[list[Piece]]) -> list[tuple[str, str]]:
    """Kind and text of each block that these pieces make, computed in the plainest way."""
    blocks: list[tuple[str, str]] = []
    for piece in (piece for pieces in script for piece in pieces):
        match piece:
            case ToolCallBegin(_, call_id, name):
                blocks.append((f"call {call_id} {name}", ""))
            case ToolArguments(_, text):
                blocks[-1] = (blocks[-1][0], blocks[-1][1] + text)
            case Text(text) | Reasoning(text):
                kind = "text" if isinstance(piece, Text) else "reasoning"
                if not text:
                    continue
                if not blocks or blocks[-1][0] != kind:
                    blocks.append((kind, ""))
                blocks[-1] = (kind, blocks[-1][1] + text)
    return blocks


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each named as its data says."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, _, body = part.partition("\ndata: ")
        event = json.loads(body)
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
