"""The frontend's benchmark measures a real frontend, prints what it says, and explains itself."""

import contextlib
import itertools
import json
import re
import socket
import threading

import pytest

from tools.bench_frontend import __main__ as bench
from tools.bench_frontend import client
from tools.bench_frontend.client import request_bytes, requests_for


def test_both_parts_count_what_a_frontend_delivers(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--seconds", "1", "--streams", "4", "--rate", "400", "--connections", "2"]) == 0
    out, errors = capfd.readouterr()
    _, streams, requests = out.splitlines()
    assert "Traceback" not in errors
    tokens = re.match(
        r"streams +(\d+) tokens/s in \d+ events/s, of one core +\d+; frontend .* added latency: p50 \d", streams
    )
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


def test_lengths_of_answers_differ_around_their_mean() -> None:
    bodies = [request.partition(b"\r\n\r\n")[2] for request in itertools.islice(requests_for(200), 202)]
    lengths = [json.loads(body)["max_tokens"] for body in bodies]
    assert (min(lengths), max(lengths), sum(lengths) / len(lengths)) == (100, 298, pytest.approx(199, abs=1))


def serve(listener: socket.socket, *parts: bytes) -> None:
    """Answer every request on one connection with these parts, each sent when the one before is likely to be read."""
    connection, _ = listener.accept()
    pause = threading.Event()
    with connection, contextlib.suppress(ConnectionError):  # the client has measured, and leaves in the midst of it
        while connection.recv(1 << 16):
            for part in parts:
                connection.sendall(part)
                pause.wait(0.02)


def test_the_client_asks_again_when_the_end_of_an_answer_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WARM_UP_SECONDS", 0.0)
    chunk = b'1b\r\n"content":" 000000000000001"\r\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, chunk, chunk, b"0\r\n\r\n"), daemon=True).start()
        counted = client.run(listener.getsockname()[1], 1, 2, 0.5)
    assert counted.requests >= 2
    assert counted.tokens == counted.events >= 2 * counted.requests


def test_a_silent_connection_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WARM_UP_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit, match="1 of 1 connections"):
        client.run(listener.getsockname()[1], 1, 2, 0.3)


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (0.0, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert bench.percentile(list(range(100, 0, -1)), share) == value


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--streams", "0"], ["--rate", "-1"], ["--only", "x"]])
def test_impossible_numbers_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
