"""The frontend's benchmark measures a real frontend, prints what it says, and explains itself."""

import json
import re

import pytest

from tools.bench_frontend import __main__ as bench
from tools.bench_frontend.client import request_bytes


def test_both_parts_count_what_a_frontend_delivers(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--seconds", "1", "--streams", "4", "--rate", "400", "--connections", "2"]) == 0
    out, errors = capfd.readouterr()
    _, streams, requests = out.splitlines()
    assert "Traceback" not in errors
    tokens = re.match(r"streams +(\d+) tokens/s, of one core +\d+; frontend .* added latency: p50 \d", streams)
    assert tokens is not None, streams
    assert 0 < int(tokens[1]) <= 500, "no more than were offered, but for the edges of the measured time"
    asked = re.match(r"requests +(\d+) requests/s, of one core +\d+; .* request: p50 \d", requests)
    assert asked is not None, requests
    assert int(asked[1]) > 0


def test_a_request_says_what_is_asked_for() -> None:
    head, _, body = request_bytes(200).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert (json.loads(body)["max_tokens"], json.loads(body)["stream"]) == (200, True)
    assert "stream" not in json.loads(request_bytes(1).partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (0.0, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert bench.percentile(list(range(100, 0, -1)), share) == value


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--streams", "0"], ["--rate", "-1"], ["--only", "x"]])
def test_impossible_numbers_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
