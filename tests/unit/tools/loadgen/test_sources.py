"""What is read of files, and what is said of those that cannot be used; arrivals and lengths without a file."""

import gzip
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.loadgen.sources import Request, blocks_of_outputs, read_source, synthetic
from tools.loadgen.synthetic import SpecError, parse_arrivals, parse_lengths
from tools.simulate.traces import read_trace
from tools.traces import TraceError

LENGTHS = {"timestamp": 0, "input_length": 3, "output_length": 2}
BATCH = {"url": "/v1/completions", "body": {"prompt": "x"}}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_recording_is_a_mooncake_trace_with_more_fields(tmp_path: Path) -> None:
    row = {"timestamp": 2000.5, "input_length": 40, "output_length": 3, "hash_ids": [2**63 - 1, 5], "block_size": 32}
    rows = [row | {"model": "m", "tenant": None}, row | {"timestamp": 500.5, "hash_ids": [-4, 7]}]
    found, has_times = read_source(write(tmp_path / "t", rows), limit=None, length_scale=1.0)
    assert has_times
    assert [request.time for request in found] == pytest.approx([0.0, 1.5])
    assert [request.blocks for request in found] == [[-4, 7], [2**63 - 1, 5]]
    assert {(request.input_length, request.output_length, request.block_size) for request in found} == {(40, 3, 32)}
    scaled, _ = read_source(tmp_path / "t", limit=1, length_scale=0.5)
    assert [(request.input_length, request.block_size) for request in scaled] == [(20, 16)]


def test_texts_are_in_order_of_their_times(tmp_path: Path) -> None:
    rows = [{"timestamp_us": 3e6, "input": "b", "output": ""}, {"timestamp_us": 1e6, "input": "a", "output": "x"}]
    found, has_times = read_source(write(tmp_path / "t", rows), limit=None, length_scale=1.0)
    assert [(request.time, request.text) for request in found] == [(0.0, "a"), (2.0, "b")]
    assert has_times


def test_bodies_keep_their_bytes(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "é"}], "n": 1}
    batch = [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat}]
    found, has_times = read_source(write(tmp_path / "b", batch), limit=None, length_scale=1.0)
    assert not has_times
    assert [(json.loads(request.body), request.path) for request in found] == [(chat, "/v1/chat/completions")]
    found, _ = read_source(write(tmp_path / "c", [{"prompt": "x"}, chat]), limit=None, length_scale=1.0)
    assert [request.path for request in found] == ["/v1/completions", "/v1/chat/completions"]


AZURE = {
    "2023": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    ),
    "2024": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:04.324569+00:00,396,109\n"
        "2024-05-10 00:00:00.009990+00:00,374,44\n"
    ),
    "other columns": (
        '\ufeffGeneratedTokens,"TIMESTAMP",Model,ContextTokens\r\n44,2024-05-10 01:00:00.00999+01:00,m,374\r\n\r\n'
        "109,2024-05-10 00:00:04.324569+00:00,m,396\r\n"
    ),
}


@pytest.mark.parametrize("text", AZURE.values(), ids=AZURE)
def test_azures_csv_is_read_as_it_was_published(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, newline="")
    found, has_times = read_source(path, limit=None, length_scale=1.0)
    assert has_times
    assert [request.time for request in found] == pytest.approx([0.0, 4.314579], abs=1e-6)
    assert [(request.input_length, request.output_length) for request in found] == [(374, 44), (396, 109)]
    assert [request.blocks for request in found] == [None, None]
    [half] = read_source(path, limit=1, length_scale=0.5)[0]
    assert (half.input_length, half.output_length) == (187, 22)
    simulated = read_trace(path)
    assert [(row.time, row.input_length, row.output_length) for row in simulated] == [
        (request.time, request.input_length, request.output_length) for request in found
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,3,4", "line 3: TIMESTAMP must be a date and time, not 'yesterday'"),
        ("2024-05-10 00:00:00,3", "line 3: it has 2 columns, and the first line 3"),
        ("2024-05-10 00:00:00,x,4", "line 3: Expected `int`, got `str` - at ContextTokens"),
        ("2024-05-10 00:00:00,0,4", "line 3: Expected `int` >= 1 - at ContextTokens"),
        ("2024-05-10 00:00:00,3,-4", "line 3: Expected `int` >= 0 - at GeneratedTokens"),
        ("1924-05-10 00:00:00,3,4", "line 3: Expected `float` >= 0.0 - at TIMESTAMP"),
    ],
    ids=["time", "columns", "text", "zero", "negative", "old"],
)
@pytest.mark.parametrize("read", [read_trace, lambda path: read_source(path, limit=None, length_scale=1.0)])
def test_a_wrong_line_of_azures_csv_is_named(
    row: str, message: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,3,0\n{row}\n")
    with pytest.raises(TraceError, match=re.escape(f"{path}: {message}")):
        read(path)


def test_a_csv_without_requests_or_of_other_columns_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for text, message in (
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests in it"),
        ("time,prompt\n1,2\n", "line 1: JSON is malformed"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=message):
            read_source(path, limit=None, length_scale=1.0)


def turn(input_length: int, blocks: list[int], outputs: list[int]) -> Request:
    return Request(0.0, input_length, 4, blocks, 4, output_blocks=outputs)


def test_blocks_that_only_an_output_can_have_left_are_counted() -> None:
    """By hand; blocks of 4 tokens. A prompt's last block, which the output fills, is one of the output's."""
    requests = [
        turn(10, [1, 2, 3], [3, 4]),  # 3 is half of the prompt's
        turn(18, [1, 2, 3, 4, 5], [5]),  # 3 and 4 were generated
        turn(22, [1, 2, 3, 4, 5, 6], []),  # so was 5, but 3 and 4 are in a prompt meanwhile
        turn(8, [7, 8], [9]),
        Request(0.0, 12, 4),
    ]
    assert blocks_of_outputs(requests) == (2 + 4 + 5 + 2, 4 + 5, 2 + 1)
    assert blocks_of_outputs([]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no requests in it"),
        ([{"what": 1}], "its first line is of no format that is known"),
        ([{"prompt": "x"}, {"nothing": 1}], "line 2: a request has messages or a prompt"),
        ([{"prompt": "x", "n": 2}], "line 1: n must be 1"),
        ([{"url": "/v1/embeddings", "body": {}}], "line 1: url must be /v1/completions or"),
        ([{"input": "x", "timestamp_us": "now"}], "line 1: Expected `float \\| null`"),
        ([{"input": "x"}, {"input": ""}], "line 2: its input is empty"),
        ([5], "line 1: Expected `object`"),
        ([{"prompt": ["x", "y"]}], "line 1: it has 2 prompts"),
        ([{"prompt": [[1], [2]]}], "line 1: it has 2 prompts"),
        ([{"prompt": "x", "best_of": 3}], "line 1: best_of must be 1"),
        ([{"input": "x"}, {"input": "y", "timestamp_us": 5}], "line 1: it has no timestamp_us, and line 2 has one"),
        ([{"input": "x", "timestamp_us": 5}, {"input": "y"}], "line 2: it has no timestamp_us, and line 1 has one"),
        (
            [BATCH | {"timestamp": 1}, BATCH],
            "line 2: it has no timestamp, and line 1 has one",
        ),
        ([LENGTHS | {"timestamp": 1e300}], "line 1: Expected `float` <= "),
        ([LENGTHS | {"hash_ids": [1 << 70]}], "line 1: Expected `int` <= "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_cannot_be_used_is_told_in_a_line(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read_source(write(tmp_path / "t", rows), limit=None, length_scale=1.0)


def test_texts_cannot_be_scaled(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be scaled"):
        read_source(write(tmp_path / "t", [{"input": "x"}]), limit=None, length_scale=2.0)


def test_the_shared_traces_are_read(shared_dir: Path) -> None:
    """Rows as the folder's README has them."""
    folder = shared_dir / "traces"
    counts = {"mooncake_conversation_raw": 1500, "mooncake_conversation_div16": 3000, "azure2023_conv": 3000}
    counts |= {"azure2023_code": 3000, "agent_text": 573}
    for name, count in counts.items():
        found, has_times = read_source(folder / f"{name}.jsonl", limit=None, length_scale=1.0)
        assert len(found) == count
        assert has_times
        assert all(before.time <= after.time for before, after in itertools.pairwise(found))


DRAWS = 20_000


@pytest.mark.parametrize(("text", "cv"), [("poisson:4", 1.0), ("gamma:4,3", 3.0), ("gamma:4,0.2", 0.2), ("fixed:4", 0)])
def test_gaps_have_the_mean_and_spread_that_were_asked_for(text: str, cv: float) -> None:
    gaps = np.array(parse_arrivals(text).gaps(np.random.default_rng(1), DRAWS))
    error = 5 / np.sqrt(DRAWS)  # five standard errors of the mean, in its own standard deviations
    assert gaps.mean() == pytest.approx(0.25, abs=0.25 * (cv * error + 1e-9))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15, abs=1e-9)
    times = parse_arrivals(text).times(np.random.default_rng(1), 100)
    assert times[0] == 0.0
    assert np.diff(times).tolist() == pytest.approx(gaps[:99].tolist()) or cv > 0
    assert times == parse_arrivals(text).times(np.random.default_rng(1), 100)


@pytest.mark.parametrize(("text", "shape"), [("poisson:4", 1), ("gamma:4,0.5", 4), ("gamma:4,1", 1)])
def test_gaps_have_the_distribution_that_was_asked_for(text: str, shape: int) -> None:
    """Kolmogorov's test against Erlang's distribution, of 1 the exponential one; 1.95 is exceeded by one in 1,000."""
    gaps = np.sort(parse_arrivals(text).gaps(np.random.default_rng(3), DRAWS))
    phases = gaps * 4 * shape
    below = 1 - np.exp(-phases) * sum(phases**part / math.factorial(part) for part in range(shape))
    ranks = np.arange(DRAWS + 1) / DRAWS
    distance = max(float((ranks[1:] - below).max()), float((below - ranks[:-1]).max()))
    assert distance * DRAWS**0.5 < 1.95


@pytest.mark.parametrize(("text", "dispersion"), [("poisson:4", 1.0), ("gamma:4,3", 9.0), ("gamma:4,0.5", 0.25)])
def test_arrivals_come_in_bursts_as_large_as_was_asked_for(text: str, dispersion: float) -> None:
    """Variance by mean of how many come in 100 s: in the long run the square of the gaps' variation (Cox, 1962)."""
    times = np.array(parse_arrivals(text).times(np.random.default_rng(5), 400_000))
    counts = np.histogram(times, np.arange(0.0, times[-1], 100.0))[0]
    assert counts.mean() == pytest.approx(400, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=5 * (2 / len(counts)) ** 0.5 + 0.02)


@pytest.mark.parametrize(
    ("text", "median"),
    [("7", 7), ("uniform:10,30", 20), ("normal:100,10", 100), ("lognormal:50,0.5", 50), ("exponential:100", 69)],
)
def test_lengths_have_the_median_that_was_asked_for(text: str, median: int) -> None:
    lengths = parse_lengths(text)(np.random.default_rng(2), DRAWS)
    assert all(isinstance(length, int) and length >= 1 for length in lengths[:100])
    assert float(np.median(lengths)) == pytest.approx(median, rel=0.03)
    if text.startswith("uniform"):
        assert (min(lengths), max(lengths)) == (10, 30)


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:-1", "poisson:nan", "gamma:1", "gamma:1,0", "closed:1.5", "x:1"]
)
def test_bad_arrivals(text: str) -> None:
    with pytest.raises(SpecError, match="must be trace"):
        parse_arrivals(text)


@pytest.mark.parametrize("text", ["", "0", "2.5", "uniform:5", "uniform:9,5", "normal:0,1", "exponential:inf", "1,2"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(SpecError, match="must be N"):
        parse_lengths(text)


def test_synthetic_requests_share_nothing_and_follow_the_seed() -> None:
    def draw(seed: int) -> list[Any]:
        arrivals = parse_arrivals("poisson:2")
        lengths = parse_lengths("uniform:5,50"), parse_lengths("normal:20,5")
        return synthetic(50, arrivals, *lengths, np.random.default_rng(seed))

    assert draw(1) == draw(1) != draw(2)
    assert all(request.blocks is None for request in draw(1))


@pytest.mark.parametrize("scale", [1e8, 1e300])
@pytest.mark.parametrize("row", [LENGTHS, LENGTHS | {"hash_ids": [1]}], ids=["lengths", "blocks"])
def test_lengths_scaled_beyond_reason_are_told(row: dict[str, Any], scale: float, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: .* tokens scaled by 1e\+\d+ are more than 16,777,216"):
        read_source(write(tmp_path / "t", [row]), limit=None, length_scale=scale)


ROWS_OF_EACH_KIND = [LENGTHS, BATCH, {"prompt": "x"}, {"input": "x"}]


@pytest.mark.parametrize("row", ROWS_OF_EACH_KIND, ids=["lengths", "batch", "bodies", "texts"])
def test_a_pipe_loses_no_request(row: dict[str, Any], tmp_path: Path) -> None:
    """As `<(zcat trace.gz)` is one: it can be read once only."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=((json.dumps(row) + "\n") * 5000,))
    writer.start()
    found, _ = read_source(pipe, limit=None, length_scale=1.0)
    writer.join()
    assert len(found) == 5000


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + (json.dumps(LENGTHS) + "\r\n\r\n").encode() * 2)
    found, _ = read_source(path, limit=None, length_scale=1.0)
    assert [request.input_length for request in found] == [3, 3]


def test_a_compressed_file_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(json.dumps(LENGTHS).encode()))
    with pytest.raises(TraceError, match="it is compressed"):
        read_source(path, limit=None, length_scale=1.0)


def test_the_limit_counts_choices(tmp_path: Path) -> None:
    rows = write(tmp_path / "t", [LENGTHS | {"output_lengths": [2, 3, 4]}] * 2)
    for limit in (1, 2, 3, 4, 6):
        assert len(read_source(rows, limit=limit, length_scale=1.0)[0]) == limit


@pytest.mark.parametrize(
    "row",
    [
        lambda time: LENGTHS | {"timestamp": time},
        lambda time: BATCH | {"timestamp": time},
        lambda time: {"input": "x", "timestamp_us": 1e3 * time},
    ],
    ids=["recording", "batch", "texts"],
)
def test_the_first_requests_are_those_that_arrived_first(row: Callable[[int], dict[str, Any]], tmp_path: Path) -> None:
    """A recording has its lines in the order in which requests ended."""
    path = write(tmp_path / "t", [row(time) for time in (7000, 1000, 9000, 2000, 4000)])
    for limit, times in ((1, [0.0]), (3, [0.0, 1.0, 3.0]), (9, [0.0, 1.0, 3.0, 6.0, 8.0])):
        found, _ = read_source(path, limit=limit, length_scale=1.0)
        assert [request.time for request in found] == times


def test_the_simulator_takes_the_same_first_requests(tmp_path: Path) -> None:
    rows = [LENGTHS | {"timestamp": time, "input_length": length} for time, length in ((700, 7), (100, 1), (900, 9))]
    path = write(tmp_path / "t", rows)
    assert [request.input_length for request in read_trace(path, limit=2)] == [1, 7]
    assert [request.input_length for request in read_source(path, limit=2, length_scale=1.0)[0]] == [1, 7]
