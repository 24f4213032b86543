"""Two thousand bad requests to a real server: nothing but 2xx and 4xx, and it serves on as if nothing had been."""

import contextlib
import http.client
import json
import math
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from tests.e2e.server import SMALL, Server
from tests.fuzz.bad_requests import GOOD as REQUESTS
from tests.fuzz.bad_requests import Good, mutated_bytes, mutated_value, raw_bytes

PER_KIND = {"schemathesis": 800, "values": 500, "bytes": 300, "raw": 400}  # at least
RAW_SECONDS = 0.4
SHORT = ("--max-model-len", "96", "--max-body-bytes", "1048576")  # what is good after all ends soon
GOOD = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}


class Target:
    """The server, what came back by kind and status, and the good request after each hundred."""

    def __init__(self, server: Server) -> None:
        self.server = server
        parts = urlsplit(server.url)
        self.address = (parts.hostname or "", parts.port or 0)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.expected = self.good()
        self.document = json.loads(self.get("/openapi.json"))
        self.requests = [(path, body) for path, body in REQUESTS if path in self.document["paths"]]
        self.processes = {name: process.pid for name, process in server.roles().items()}

    def good(self) -> str:
        status, body = self.post("/v1/chat/completions", json.dumps(GOOD).encode())
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["message"]["content"])

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        """What comes back until the connection closes; it is given up when the server waits for more bytes."""
        received = b""
        with (
            contextlib.suppress(ConnectionError, TimeoutError),  # also when it is closed before all has been sent
            socket.create_connection(self.address, timeout=RAW_SECONDS) as connection,
        ):
            connection.sendall(data)
            while part := connection.recv(65536):
                received += part
        return received

    def note(self, kind: str, status: str, body: bytes, sent: Any) -> None:
        assert status[0] in "-24", (sent, status, body)
        assert b"Traceback" not in body, sent
        self.counts[kind, status] += 1
        if self.counts.total() % 100 == 0:
            assert self.good() == self.expected


@pytest.fixture(scope="module")
def target(model_path: Path) -> Iterator[Target]:
    with Server(model_path, *SMALL, *SHORT) as server:
        target = Target(server)
        yield target
        assert {name: process.pid for name, process in server.roles().items()} == target.processes, "one has exited"
        assert target.good() == target.expected
        print("\nkind          status  count")
        for (kind, status), count in sorted(target.counts.items()):
            print(f"{kind:13} {status:6} {count:6}")
        print(f"all           {'':6} {target.counts.total():6}")
    assert "Traceback" not in server.stderr, server.stderr
    kinds = {kind for kind, _ in target.counts}  # not all where only some tests were chosen
    assert target.counts.total() >= sum(PER_KIND[kind] for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "make"), [("values", mutated_value), ("bytes", mutated_bytes)])
def test_mutations_of_good_requests(
    target: Target, kind: str, make: Callable[[random.Random, Good], tuple[str, bytes]]
) -> None:
    rng = random.Random(kind)
    for _ in range(PER_KIND[kind]):
        path, body = make(rng, target.requests)
        status, answer = target.post(path, body)
        target.note(kind, str(status), answer, (path, body))


@pytest.mark.slow
def test_raw_bytes(target: Target) -> None:
    rng = random.Random("raw")
    for _ in range(PER_KIND["raw"]):
        data = raw_bytes(rng, target.requests)
        answer = target.raw(data)
        line = answer.partition(b"\r\n")[0].split()
        # Nothing comes back where the server waits for the rest.
        status = line[1].decode() if len(line) > 1 else "-"
        if status == "100":
            status = answer.partition(b"\r\n\r\n")[2][9:12].decode() or "-"
        target.note("raw", status, answer, data)


@pytest.mark.slow
def test_schemathesis(target: Target) -> None:
    document = target.document
    schema = schemathesis.openapi.from_dict(document)
    paths = [path for path, methods in document["paths"].items() if "post" in methods]
    each = math.ceil(PER_KIND["schemathesis"] / (2 * len(paths)))
    for path in paths:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            left = each

            @seed(5)
            @given(schema[path]["POST"].as_strategy(generation_mode=mode), st.booleans())
            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case: Any, served: bool) -> None:
                nonlocal left
                if not left:
                    return
                left -= 1
                if served and isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = "smol"
                response = case.call(base_url=target.server.url, timeout=60)
                target.note("schemathesis", str(response.status_code), response.content, case.body)

            ask()
