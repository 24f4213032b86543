"""What the command says of a server that gives no trace; that it writes one is in tests/e2e/test_timelines.py."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.trace import main

ANSWERS = {
    "/keys/debug/trace": (401, b'{"error": {"message": "an API key is needed", "type": "x"}}'),
    "/old/debug/trace": (404, b"not found"),
    "/good/debug/trace": (200, b"{}"),
}


ASKED: list[tuple[str, str | None]] = []  # query and key


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        ASKED.append((query, self.headers["Authorization"]))
        status, body = ANSWERS[path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("{url}/keys", "answers 401: an API key is needed"),
        ("{url}/old", "answers 404: something that is no error of a tokenmill server"),
        ("http://127.0.0.1:1", "cannot be reached: "),
        ("127.0.0.1:8000", "--url 127.0.0.1:8000: "),
        ("file:///etc", "--url file:///etc: it must begin with http:// or https://"),
        ("http://[", "--url http://[: "),
        ("http://127.0.0.1:port", "--url http://127.0.0.1:port: nonnumeric port"),
        ("http://127.0.0.1:1/a b", "--url http://127.0.0.1:1/a b: "),
    ],
)
def test_a_server_that_gives_none(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], of: str, words: str
) -> None:
    out = tmp_path / "trace.json"
    assert main(["--url", of.format(url=url), "--seconds", "0.1", "--out", str(out)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the connection broke: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", "IncompleteRead"),
        (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100\r\n\r\n{",
            "answers 503: something that is no error",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "BadStatusLine SSH-2.0-OpenSSH_9.2"),
        (b"+OK " + b"x" * 70000, "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "got more than 100 headers"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "BadStatusLine"),
    ],
    ids=["nothing", "cut", "cut chunk", "cut error", "ssh", "long line", "headers", "tls alert"],
)
def test_a_server_that_stops_meanwhile_or_speaks_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes, words: str
) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            with suppress(OSError):  # it does not read all of what is no HTTP
                connection.sendall(answer)

    out = tmp_path / "trace.json"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["--url", url, "--seconds", "0.1", "--out", str(out)]) == 2
        thread.join(10)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {url}")
    assert words in line
    assert len(line) < 250
    assert line.isprintable()
    assert not out.exists()


def test_the_key_and_the_seconds_are_sent_along(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_API_KEY", "secret")
    ASKED.clear()
    assert main(["--url", url + "/good/", "--seconds", "7", "--out", str(tmp_path / "trace.json")]) == 0
    assert ASKED == [("seconds=7.0", "Bearer secret")]
    assert (tmp_path / "trace.json").read_bytes() == b"{}"


def test_a_place_where_nothing_can_be_written_is_told_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path / "none" / "trace.json")]) == 2
    assert "--out" in capsys.readouterr().err
