"""Server-sent events, however the network cuts them."""

import asyncio
import itertools
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from tools.event_stream import data_lines


@given(
    events=st.lists(st.sampled_from([b"[DONE]", b'{"a": 1}', '{"text": "é: \\n data:"}'.encode()]), max_size=8),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    space=st.sampled_from([b"", b" "]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_data_comes_whole_and_in_order_and_all_else_is_left_out(
    events: list[bytes], newline: bytes, space: bytes, cuts: list[int]
) -> None:
    wire = newline * 2 + b": keep-alive" + newline * 2
    wire += b"".join(b"event: message" + newline + b"data:" + space + event + newline * 2 for event in events)
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]

    async def pieces() -> AsyncIterator[bytes]:
        for begin, end in itertools.pairwise(edges):
            yield wire[begin:end]

    async def read() -> list[bytes]:
        return [line async for lines in data_lines(pieces()) for line in lines]

    assert asyncio.run(read()) == events
