"""Traces: what is read, what is shared, and what is said about bad lines."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.codec import unpack_ints
from tools.simulate.traces import (
    OUTPUT_TOKEN,
    TraceRequest,
    infinite_cache_hits,
    infinite_cache_walk,
    read_trace,
)
from tools.traces import TraceError, scaled_rate


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(request: TraceRequest) -> list[int]:
    return list(unpack_ints(request.token_ids()))


def test_equal_hash_ids_are_equal_tokens_and_the_last_block_is_cut(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [7, 8, 9], "block_size": 4},
        {"timestamp": 500, "input_length": 7, "output_length": 1, "hash_ids": [7, 5, 1], "block_size": 4},
        {"timestamp": 250, "input_length": 4, "output_length": 2, "hash_ids": [9], "block_size": 4},
    ]
    earliest, first, second = read_trace(write(tmp_path / "t", rows))
    assert (earliest.time, first.time, second.time) == (0.0, 0.25, 0.25)
    assert [request.output_length for request in (earliest, first, second)] == [2, 3, 1]
    one, two, three = tokens(first), tokens(second), tokens(earliest)
    assert [len(one), len(two), len(three)] == [10, 7, 4]
    assert one[:4] == two[:4]
    assert not set(one[4:8]) & set(two[4:])
    assert one[8:] == three[:2]  # block 9, wherever it stands
    assert OUTPUT_TOKEN not in one + two + three
    assert len(set(one)) == 10


def test_a_line_without_hash_ids_shares_with_nobody(tmp_path: Path) -> None:
    row: dict[str, object] = {"timestamp": 1.5, "input_length": 6, "output_length": 2}
    first, second = read_trace(write(tmp_path / "t", [row, row]))
    assert len(tokens(first)) == len(tokens(second)) == 6
    assert not set(tokens(first)) & set(tokens(second))


def test_blocks_have_512_tokens_unless_said_otherwise(tmp_path: Path) -> None:
    row: dict[str, object] = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    other: dict[str, object] = {"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [1]}
    first, second = read_trace(write(tmp_path / "t", [row, other]))
    assert tokens(first)[:512] == tokens(second)


def test_scales_and_limit(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 1000 * index, "input_length": 1000, "output_length": 50, "hash_ids": [1, index + 5]}
        for index in range(4)
    ]
    trace = read_trace(write(tmp_path / "t", rows), limit=3, length_scale=1 / 16)
    assert [request.input_length for request in trace] == [32 + 30] * 3  # 512 / 16 and 488 / 16, rounded
    assert [request.output_length for request in trace] == [3] * 3
    assert tokens(trace[0])[:32] == tokens(trace[1])[:32]
    assert not set(tokens(trace[0])[32:]) & set(tokens(trace[1])[32:])
    assert [request.time for request in scaled_rate(trace, 4.0)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 5}', "line 3: Object missing required field `output_length`"),
        (
            '{"timestamp": 0, "input_length": "5", "output_length": 1}',
            r"line 3: Expected `int`, got `str`.*input_length",
        ),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "line 3: .*>= 0.*timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 3: .*>= 1.*input_length"),
        (
            '{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [3]}',
            "line 3: 1 hash_ids of 512 tokens are too few for an input_length of 900",
        ),
        ("[1]", "line 3: Expected `object`, got `array`"),
        ('{"x": ' + 100_000 * "[", "line 3: .*recursion"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n\n' + line + "\n")
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(path)


def longest_prefix_hits(prompts: list[list[int]], block_size: int) -> int:
    """By definition: full blocks that are a prefix of an earlier prompt's full blocks."""
    hits = 0
    for index, prompt in enumerate(prompts):
        full = len(prompt) // block_size * block_size
        best = 0
        for earlier in prompts[:index]:
            limit = len(earlier) // block_size * block_size
            common = 0
            while common < min(full, limit) and prompt[common] == earlier[common]:
                common += 1
            best = max(best, common // block_size)
        hits += best
    return hits


@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=12),
    block_size=st.integers(1, 4),
)
def test_the_infinite_cache_finds_every_prefix_that_was_there(prompts: list[list[int]], block_size: int) -> None:
    trace = [
        TraceRequest(0.0, b"".join(token.to_bytes(4, "little") for token in prompt), len(prompt), 1)
        for prompt in prompts
    ]
    assert infinite_cache_hits(trace, block_size) == longest_prefix_hits(prompts, block_size) * block_size
    numbers = [numbers for _, numbers in infinite_cache_walk(trace, block_size)]
    assert [len(found) for found in numbers] == [len(prompt) // block_size for prompt in prompts]


def test_the_shared_traces_can_be_read(shared_dir: Path) -> None:
    """Row counts and the hit rate of the infinite cache as the folder's README and the issue give them."""
    rows = {
        "mooncake_conversation_raw.jsonl": 1500,
        "mooncake_conversation_div16.jsonl": 3000,
        "azure2023_conv.jsonl": 3000,
        "azure2023_code.jsonl": 3000,
    }
    for name, count in rows.items():
        assert len(read_trace(shared_dir / "traces" / name)) == count
    trace = read_trace(shared_dir / "traces" / "mooncake_conversation_div16.jsonl")
    share = infinite_cache_hits(trace, 16) / sum(request.input_length for request in trace)
    assert share == pytest.approx(0.32, abs=0.005)


def test_who_asked_and_how_urgently_is_kept_and_other_meanings_are_not(tmp_path: Path) -> None:
    row: dict[str, object] = {"timestamp": 0, "input_length": 5, "output_length": 2}
    rows = [row | {"tenant": 3, "priority": -2}, row | {"tenant": 0}, row | {"tenant": "x", "priority": "high"}]
    found = [(request.tenant, request.priority) for request in read_trace(write(tmp_path / "t", rows))]
    assert found == [("3", -2), ("", 0), ("x", 0)]


@pytest.mark.parametrize("scale", [0.25, 1.0, 2.0])
def test_a_next_turn_goes_on_behind_what_was_said_at_any_scale(tmp_path: Path, scale: float) -> None:
    rows: list[dict[str, object]] = [
        {
            "timestamp": 0,
            "input_length": prompt,
            "output_length": 30,
            "block_size": 8,
            "hash_ids": list(range(-(-prompt // 8))),
            "output_hash_ids": list(range(prompt // 8, (prompt + 29) // 8)),
        }
        for prompt in (16, 17, 20, 23)
    ]
    rows.append({"timestamp": 1, "input_length": 40, "output_length": 1, "block_size": 8, "hash_ids": list(range(5))})
    *earlier, later = read_trace(write(tmp_path / "t", rows), length_scale=scale)
    blocks = round(8 * scale) * 5
    for request in earlier:
        said = tokens(request) + list(unpack_ints(request.outputs))
        assert said[:blocks] == tokens(later)
        assert len(request.outputs) // 4 <= request.output_length
