"""Clients that leave, stall, or never say a word, over plain TCP and TLS: their requests end, nobody else notices."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from ..fake_engine import FakeEngine, expected_text
from .process import Frontend, wait_until

CHAT = "/v1/chat/completions"
TLS = Path(__file__).parent / "tls"
SECONDS = 1.0  # client_timeout
CLIENTS = 24
FILES = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}


class Server(Frontend):
    """A frontend whose clients are given up soon, and of whose answers little waits in the kernel."""

    def __init__(self, run_dir: Path, engine: FakeEngine, *, tls: bool) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        self.context = ssl.create_default_context(cafile=TLS / "cert.pem") if tls else None
        # What one write leaves in the buffers below TLS is seen once a second one stays above them.
        settings: dict[str, Any] = {"keepalive_seconds": 0.4, **(FILES if tls else {})}
        super().__init__(run_dir, engine, listener=listener, client_timeout=SECONDS, **settings)

    def open(self) -> socket.socket:
        """A connection that takes in as little as the kernel allows, unless its client reads."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def ask(self, line: str, name: str) -> socket.socket:
        """A connection on which a stream has been asked for."""
        connection = self.open()
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_hostname="localhost")
        body = json.dumps({**request("tiny", line), "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-request-id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def connect(self) -> http.client.HTTPConnection:
        if self.context is None:
            return super().connect()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self.context)

    def text(self, line: str) -> str:
        """What a well-behaved client of the official kind gets streamed."""
        kind = "http" if self.context is None else "https"
        if self.context is None:
            client = openai.OpenAI(base_url=f"{kind}://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)
        else:
            client = openai.OpenAI(
                base_url=f"{kind}://127.0.0.1:{self.port}/v1",
                api_key="none",
                max_retries=0,
                http_client=openai.DefaultHttpxClient(verify=self.context),
            )
        with client:
            stream: Any = client.chat.completions.create(**request("tiny", line), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def left(self) -> int:
        """Requests counted as left by their client."""
        data = self.request("GET", "/metrics").body.decode()
        found = re.search(rf'^tokenmill:http_requests_total{{.*route="{CHAT}",status="499"}} (\d+)', data, re.MULTILINE)
        return int(found[1]) if found else 0

    def connections(self) -> int:
        return len(psutil.Process(self.process.pid).net_connections("tcp"))


def request(model: str, line: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": line}], "max_tokens": 8}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def server(
    request: pytest.FixtureRequest, engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("run"), engine, tls=request.param)
    server.wait_until_ready()
    yield server
    server.close()
    assert b"Traceback" not in server.stderr, server.stderr.decode()
    assert b"ERROR" not in server.stderr, server.stderr.decode()


def leave(connection: socket.socket, how: str) -> None:
    """End a connection as one side can; what has to stay open is closed by the caller."""
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    elif how == "half-close":  # over TLS without its close_notify, which looks like an attack
        socket.socket.shutdown(connection, socket.SHUT_WR)
    elif how == "close-notify" and isinstance(connection, ssl.SSLSocket):
        connection.settimeout(0.01)
        with contextlib.suppress(OSError):
            connection.unwrap()
    else:
        connection.close()


def slow(value: Any, name: str | None = None) -> Any:
    """A parameter of the whole run alone; it says the same of another case."""
    return pytest.param(value, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [slow("close"), slow("reset"), "half-close", "close-notify"])
@pytest.mark.parametrize("line", ["hang", slow("mute"), slow("flood"), "clog"])
def test_clients_that_leave(server: Server, engine: FakeEngine, how: str, line: str) -> None:
    before, idle, name = server.left(), server.connections(), f"{id(server)}-{how}-{line}"
    connections = [server.ask(line, f"{name}-{at}") for at in range(4)]
    asked = [engine.wait_for_request(f"{name}-{at}") for at in range(4)]
    if line == "hang":
        for connection in connections:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        leave(connection, how)
    for one in asked:
        engine.wait_for_abort(one.request_id)
    wait_until(lambda: (server.left(), server.connections()) == (before + 4, idle))
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("bytes_a_read", [slow(0, "nothing"), pytest.param(1, id="a byte at a time")])
@pytest.mark.parametrize("line", ["flood", slow("clog")])
def test_clients_that_hardly_read_are_cut_off(server: Server, engine: FakeEngine, line: str, bytes_a_read: int) -> None:
    """More than 1 MiB waits for them, or less, of which nothing seems to be taken: a TCP window opens in steps."""
    before, name = server.left(), f"{id(server)}-stall-{bytes_a_read}-{line}"
    connections = [server.ask(line, f"{name}-{at}") for at in range(4)]
    asked = [engine.wait_for_request(f"{name}-{at}") for at in range(4)]
    over = threading.Event()

    def read(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                time.sleep(0.05)
                connection.recv(bytes_a_read)

    readers = [threading.Thread(target=read, args=(connection,)) for connection in connections if bytes_a_read]
    for reader in readers:
        reader.start()
    assert server.text("slow") == expected_text(0, 8)
    for one in asked:
        engine.wait_for_abort(one.request_id)
    wait_until(lambda: server.left() == before + 4)
    over.set()
    for reader in readers:
        reader.join(10)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "data",
    [
        slow(b"", "nothing"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="half a hello"),
        slow(b"GET /health/live HTTP/1.1\r\nHost: x\r\n", "half a request"),
        slow(b"\x00" * 2000, "zeros"),
    ],
)
def test_connections_that_come_to_nothing_are_given_up(server: Server, data: bytes) -> None:
    """No place is held for ever, however many there are: neither by a handshake nor by a request."""
    idle = server.connections()
    connections = [server.open() for _ in range(CLIENTS)]
    for connection in connections:
        connection.sendall(data)
    assert server.text("hi") == expected_text(0, 8)
    for connection in connections:
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
        connection.close()
    wait_until(lambda: server.connections() <= idle)


@pytest.mark.slow
def test_a_handshake_without_a_request_is_given_up(server: Server) -> None:
    connection = server.connect()
    connection.connect()
    assert connection.sock is not None
    with contextlib.suppress(ConnectionResetError):
        assert connection.sock.recv(100) == b""
    connection.close()


def test_the_other_protocol_ends_its_connection_alone(server: Server) -> None:
    """HTTP to a TLS port, and TLS to an HTTP port."""
    context = ssl.create_default_context(cafile=TLS / "cert.pem")
    for _ in range(CLIENTS):
        with contextlib.closing(server.open()) as connection:
            if server.context is not None:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert not connection.recv(4096).startswith(b"HTTP/")
            else:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(connection, server_hostname="localhost")
    assert server.text("hi") == expected_text(0, 8)
