"""Forty clients leave a real server in every way there is, over TCP and TLS: their requests end, their KV is freed."""

import contextlib
import json
import random
import socket
import ssl
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.server import SMALL, Server

pytestmark = pytest.mark.slow

TLS = Path(__file__).parents[1] / "processes" / "frontend" / "tls"
CLIENTS = 40
WAYS = ["close", "reset", "half-close", "close-notify"]


def ask(server: Server, context: ssl.SSLContext | None, at: int) -> socket.socket:
    """A connection on which a long stream has begun, or is about to."""
    parts = urlsplit(server.url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    if context is not None:
        connection = context.wrap_socket(connection, server_hostname="localhost")
    prompt = {"model": "smol", "prompt": f"Story {at}:", "max_tokens": 4000, "ignore_eos": True, "stream": at % 4 != 3}
    body = json.dumps(prompt).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half-close":
        socket.socket.shutdown(connection, socket.SHUT_WR)
        return
    elif how == "close-notify" and isinstance(connection, ssl.SSLSocket):
        connection.settimeout(0.01)
        with contextlib.suppress(OSError):
            connection.unwrap()
        return
    connection.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_b074_requests_of_clients_that_leave_end_and_free_their_kv(model_path: Path, tls: bool) -> None:
    rng = random.Random(74)
    context = ssl.create_default_context(cafile=TLS / "cert.pem") if tls else None
    flags = ("--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem")) if tls else ()
    with Server(model_path, *SMALL, *flags) as server:
        http: Any = {} if context is None else {"http_client": openai.DefaultHttpxClient(verify=context)}
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, **http)

        def answer(stream: bool) -> str:
            got: Any = client.completions.create(
                model="smol", prompt="The sea is", max_tokens=24, temperature=0, stream=stream
            )
            return "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text

        def progress() -> dict[str, Any]:
            with urllib.request.urlopen(server.url + "/health/progress", timeout=60, context=context) as response:
                return dict(json.load(response))

        expected = answer(False)
        connections = [ask(server, context, at) for at in range(CLIENTS)]
        deadline = time.monotonic() + 120
        while progress()["running"] < CLIENTS // 2:
            assert time.monotonic() < deadline
        for connection in rng.sample(connections, CLIENTS):
            leave(connection, rng.choice(WAYS))
            time.sleep(rng.random() * 0.05)
        while (last := progress())["running"] or last["waiting"] or last["kv_blocks"]["private"]:
            assert time.monotonic() < deadline, last
            time.sleep(0.05)
        assert answer(True) == answer(False) == expected
        for connection in connections:
            connection.close()
    assert "Traceback" not in server.stderr, server.stderr
