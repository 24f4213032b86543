"""API keys, web pages of other origins, TLS, and clients that stall."""

import contextlib
import hashlib
import http.client
import json
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from config.api_keys import key_line
from frontend.routes import ROUTES

from ..fake_engine import GUSH, FakeEngine
from .process import Answer, Frontend, wait_until

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEYS = {"team-a": "key-of-team-a", "": "key-of-nobody", "team-b": "key-of-team-b"}
TLS = Path(__file__).parent / "tls"
ORIGIN = "https://chat.example.org"
SECONDS = 1.0  # client_timeout of the frontend whose clients stall


@pytest.fixture(scope="module")
def closed(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """A frontend that asks for keys, and lets the pages of one origin in."""
    folder = tmp_path_factory.mktemp("closed")
    keys = folder / "keys"
    keys.write_text("".join(key_line(key, name) + "\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    frontend = Frontend(folder, engine, api_key_file=str(keys), cors_origin=(ORIGIN, "http://localhost:3000"))
    yield frontend.wait_until_ready()
    frontend.close()
    text = frontend.stderr.decode()
    assert "Traceback" not in text
    assert not any(key in text for key in KEYS.values())


def check_refused(answer: Answer) -> None:
    assert answer.status == 401
    if answer.json().get("type") == "error":  # Anthropic's form, on its routes
        assert answer.json()["error"]["type"] == "authentication_error"
    else:
        assert answer.error()["code"] == "invalid_api_key"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


PATHS = [(route.method, route.path.partition("{")[0], route.needs_key) for route in ROUTES]


@pytest.mark.parametrize(
    ("method", "path", "needs_key"),
    [
        *PATHS,
        ("GET", "/nothing", True),
        ("POST", "/health/live", True),
        ("OPTIONS", CHAT, True),
        ("GET", "/health/../metrics", True),
        ("GET", "//health/live", True),
        ("GET", "/metrics?/health/live", True),
    ],
)
def test_every_route_but_bare_health_asks_for_a_key(closed: Frontend, method: str, path: str, needs_key: bool) -> None:
    answer = closed.request(method, path, BODY if method == "POST" else None)
    if needs_key:
        check_refused(answer)
    else:
        assert answer.status in (200, 503)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer key-of-team"},
        {"Authorization": "Bearer key-of-team-aa"},
        {"Authorization": "Basic key-of-team-a"},
        {"Authorization": "key-of-team-a"},
        {"Authorization": "Bearer " + hashlib.sha256(b"key-of-team-a").hexdigest()},
        {"Authorization": "Bearer key-of-team-a,key-of-team-b"},
        {"Authorization": "Bearer é"},
        {"Authorization": "Bearer "},
        {"x-api-key": "team-a"},
        {"Cookie": "key-of-team-a"},
        {"x-api-key": "key-of-team-a", "Authorization": "Bearer wrong"},
    ],
    ids=str,
)
def test_what_is_no_key(closed: Frontend, headers: dict[str, str]) -> None:
    encoded: Any = {name: value.encode("utf-8") for name, value in headers.items()}
    check_refused(closed.request("POST", CHAT, BODY, encoded))
    check_refused(closed.request("POST", CHAT + "?api_key=key-of-team-a", BODY, encoded))


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("form", ["Authorization: Bearer {}", "Authorization: bearer {}", "x-api-key: {}"])
def test_every_key_opens_and_names_its_tenant(closed: Frontend, engine: FakeEngine, name: str, form: str) -> None:
    header, _, value = form.format(KEYS[name]).partition(": ")
    request_id = f"edge-{name}-{form}"
    answer = closed.request("POST", CHAT, BODY, {header: value, "x-request-id": request_id})
    assert answer.status == 200
    tenant = name or hashlib.sha256(KEYS[""].encode()).hexdigest()[:16]
    request = engine.wait_for_request(request_id)
    assert (request.tenant, request.namespace) == (tenant, tenant)


def test_the_openai_client_raises_its_own_error(closed: Frontend) -> None:
    url = f"http://127.0.0.1:{closed.port}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**BODY)  # type: ignore[call-overload]
    with openai.OpenAI(base_url=url, api_key=KEYS["team-a"], max_retries=0) as client:
        assert client.models.list().data


def test_a_key_file_that_went_bad_is_told_without_a_traceback(engine: FakeEngine, run_dir: Path) -> None:
    frontend = Frontend(run_dir, engine, api_key_file=str(run_dir / "gone"))
    assert frontend.process.wait(20) == 1
    frontend.close()
    assert "No such file" in str(list(frontend.statuses.queue))
    assert b"Traceback" not in frontend.stderr


# --- CORS ---


def preflight(frontend: Frontend, origin: str, headers: str = "authorization,content-type") -> Answer:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return frontend.request("OPTIONS", CHAT, headers=asked)


def test_a_preflight_needs_no_key(closed: Frontend) -> None:
    answer = preflight(closed, ORIGIN)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert answer.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://chat.example.org.evil.example", ""])
def test_other_origins_get_no_permission(closed: Frontend, origin: str) -> None:
    answer = preflight(closed, origin)
    assert answer.status == 403
    assert "Access-Control-Allow-Origin" not in answer.headers
    asked = closed.request("GET", "/v1/models", headers={"Origin": origin, "x-api-key": KEYS["team-a"]})
    assert asked.status == 200, "the browser decides; other clients may send what they like"
    assert "Access-Control-Allow-Origin" not in asked.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", [KEYS["team-a"], "wrong"])
def test_pages_of_the_origin_can_read_answers_and_errors(closed: Frontend, stream: bool, key: str) -> None:
    headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
    answer = closed.request("POST", CHAT, {**BODY, "stream": stream}, headers)
    assert answer.status == (401 if key == "wrong" else 200)
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    exposed = answer.headers["Access-Control-Expose-Headers"].lower().split(", ")
    assert set(exposed) == {"x-request-id", "request-id", "retry-after", "x-tokenmill-ignored"}


def test_headers_that_are_no_names_are_not_echoed(closed: Frontend) -> None:
    assert "Access-Control-Allow-Headers" not in preflight(closed, ORIGIN, 'a"<script>').headers


def test_without_the_setting_there_is_no_cors(frontend: Frontend) -> None:
    assert preflight(frontend, ORIGIN).status == 405
    answer = frontend.request("GET", "/v1/models", headers={"Origin": ORIGIN})
    assert not any(name.startswith("Access-Control") or name == "Vary" for name in answer.headers)


def test_any_origin(engine: FakeEngine, run_dir: Path) -> None:
    frontend = Frontend(run_dir, engine, cors_origin=("*",)).wait_until_ready()
    try:
        for origin in (ORIGIN, "null"):
            assert preflight(frontend, origin).headers["Access-Control-Allow-Origin"] == "*"
    finally:
        frontend.close()


# --- TLS ---


@pytest.fixture(scope="module")
def secure(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    files = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
    frontend = Frontend(tmp_path_factory.mktemp("secure"), engine, **files)
    yield frontend.wait_until_ready()
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


def tls_client() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=TLS / "cert.pem")


def https(frontend: Frontend) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", frontend.port, timeout=20, context=tls_client())


@pytest.mark.parametrize("stream", [False, True])
def test_https(secure: Frontend, stream: bool) -> None:
    connection = https(secure)
    connection.request("POST", CHAT, json.dumps({**BODY, "stream": stream}))
    response = connection.getresponse()
    assert response.status == 200
    assert response.read().endswith(b"data: [DONE]\n\n" if stream else b"}")
    connection.close()


@pytest.mark.parametrize(
    "data",
    [b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00" * 2000, b""],
    ids=["http", "no hello", "zeros", "nothing"],
)
def test_what_is_no_tls_ends_its_connection_alone(secure: Frontend, data: bytes) -> None:
    secure.raw(data)  # returns once the connection is closed
    connection = https(secure)
    connection.request("GET", "/health/ready")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_client_that_cuts_tls_off_in_mid_stream(secure: Frontend, engine: FakeEngine) -> None:
    connection = https(secure)
    body = {**BODY, "stream": True, "messages": [{"role": "user", "content": "hang"}]}
    connection.request("POST", CHAT, json.dumps(body), {"x-request-id": "cut"})
    request = engine.wait_for_request("cut")
    assert connection.sock is not None
    connection.sock.close()
    engine.wait_for_abort(request.request_id)


def test_old_tls_versions_are_refused(secure: Frontend) -> None:
    context = tls_client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that these versions are old is the point
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", secure.port), timeout=20) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="localhost")


# --- clients that stall ---


@pytest.fixture(scope="module")
def impatient(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that not all waits in the kernel
    frontend = Frontend(tmp_path_factory.mktemp("impatient"), engine, listener=listener, client_timeout=SECONDS)
    yield frontend.wait_until_ready()
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


@pytest.mark.parametrize(
    "head",
    [b"", b"POST ", b"GET /health/live HTTP/1.1\r\nHost: x\r\n", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a line", "half a head", "no second request"],
)
def test_a_connection_without_a_request_is_closed(impatient: Frontend, head: bytes) -> None:
    answer = impatient.raw(head, half_close=False)
    assert not answer or answer.startswith(b"HTTP/1.1 200 ")


def test_a_head_that_trickles_in_is_not_waited_for(impatient: Frontend) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n")

        def cut_off() -> bool:
            try:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.1)
            except OSError:
                return True
            return False

        wait_until(cut_off)


@pytest.mark.parametrize("coding", [b"Content-Length: 500", b"Transfer-Encoding: chunked"])
def test_a_body_that_does_not_arrive_is_a_408(impatient: Frontend, coding: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + coding + b"\r\n\r\n"
    answer = impatient.raw(head + b'5\r\n{"mod', half_close=False)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer


@pytest.mark.parametrize(("stream", "ended"), [(True, False), (True, True), (False, True)])
def test_a_client_that_takes_in_nothing_is_cut_off(
    impatient: Frontend, engine: FakeEngine, stream: bool, ended: bool
) -> None:
    # Fewer bytes than the bound on what may wait.
    body = {"model": "tiny", "prompt": "gush" if ended else "clog", "stream": stream, "max_tokens": 8}
    data = json.dumps(body).encode()
    name = f"stall-{stream}-{ended}"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", impatient.port))
        connection.settimeout(20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: {name}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        request = engine.wait_for_request(name)
        wait_until(lambda: b"was cut off that takes in nothing" in impatient.stderr)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += len(part)
        assert received < GUSH
    if not ended:
        engine.wait_for_abort(request.request_id)
    impatient.stderr.clear()


def test_a_client_that_reads_slowly_is_waited_for(impatient: Frontend) -> None:
    data = json.dumps({"model": "tiny", "prompt": "gush", "max_tokens": 8}).encode()
    received = b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", impatient.port))
        connection.settimeout(20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        began = time.monotonic()
        while not received.endswith(b"}}}"):
            received += connection.recv(1 << 14)
            if time.monotonic() - began < 2 * SECONDS:
                time.sleep(0.05)
    assert received.count(b"x") > GUSH


def test_anthropics_client_sends_its_key_its_own_way(closed: Frontend) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    url = f"http://127.0.0.1:{closed.port}"
    with anthropic.Anthropic(base_url=url, api_key=next(iter(KEYS.values())), max_retries=0) as client:
        assert client.messages.create(**ask).stop_reason == "max_tokens"
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**ask)
        assert caught.value.type == "authentication_error"
