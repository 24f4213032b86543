"""Starts the real frontend process, and speaks raw HTTP to it."""

import http.client
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from config.schema import ServerConfig, SupervisorConfig
from ipc.control import Order, Ready, Status
from tools.bench_frontend.specification import frontend_spec

from ..fake_engine import MODEL, FakeEngine

_REPOSITORY = Path(__file__).resolve().parents[3]


class Frontend:
    """A frontend in a process of its own, with the launcher's ends of its pipes."""

    def __init__(
        self,
        run_dir: Path,
        engine: FakeEngine,
        *,
        listener: socket.socket | None = None,
        traces: dict[str, str] | None = None,
        measure: bool = True,
        **server: Any,
    ) -> None:
        """`traces`: endpoints of traces, by process. `measure`: the setting of that name."""
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        order_read, self._order_write = os.pipe()
        status_read, status_write = os.pipe()
        spec = frontend_spec(
            MODEL,
            engine.endpoint,
            engine.stats_endpoint,
            str(run_dir),
            self.listener.fileno(),
            ServerConfig(**server),
        )
        endpoints = msgspec.structs.replace(spec.endpoints, traces=traces or {})
        config = msgspec.structs.replace(spec.config, supervisor=SupervisorConfig(measure=measure))
        spec = msgspec.structs.replace(spec, endpoints=endpoints, config=config)
        spec_file = run_dir / f"frontend-{self.port}-{order_read}.json"
        spec_file.write_bytes(msgspec.json.encode(spec))
        arguments = ["-m", "launch.child", str(spec_file), str(order_read), str(status_write), "frontend.main"]
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            pass_fds=(self.listener.fileno(), order_read, status_write),
            cwd=_REPOSITORY,
            stderr=subprocess.PIPE,
        )
        os.close(order_read)
        os.close(status_write)
        self.statuses: queue.Queue[Status] = queue.Queue()
        threading.Thread(target=self._read_statuses, args=(status_read,), daemon=True).start()
        self.stderr = bytearray()
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    def _read_statuses(self, fd: int) -> None:
        decoder = msgspec.json.Decoder(Status)
        with os.fdopen(fd, "rb") as pipe:
            for line in pipe:
                self.statuses.put(decoder.decode(line))

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line

    def wait_for(self, kind: type, timeout: float = 20) -> Status:
        """The next status of this kind."""
        while True:
            status = self.statuses.get(timeout=timeout)
            if isinstance(status, kind):
                return status

    def wait_until_ready(self) -> "Frontend":
        self.wait_for(Ready)
        return self

    def order(self, order: Order) -> None:
        os.write(self._order_write, msgspec.json.encode(order) + b"\n")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> "Answer":
        """One request on a connection of its own; `body` is sent as it is when it is bytes, else as JSON."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def raw(self, data: bytes, *, half_close: bool = True) -> bytes:
        """What comes back for these bytes until the connection closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        os.close(self._order_write)  # the death pipe
        self.process.wait(10)
        self._stderr_reader.join(10)
        self.listener.close()


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """Data of each server-sent event."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "", "the stream ends inside an event"
        events = [line for line in lines if not line.startswith(":")]
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    def error(self) -> dict[str, Any]:
        """The error object, checked to be exactly OpenAI's."""
        body = self.json()
        assert list(body) == ["error"]
        error = body["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return error
