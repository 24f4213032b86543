"""What a socket may say besides well-kept HTTP with well-kept JSON: the same answers on every route."""

import gzip
import json
import re
from typing import Any

import pytest

from frontend.route import Route
from frontend.routes import ROUTES

from .process import Answer, Frontend

POSTS = [route for route in ROUTES if route.method == "POST"]
GETS = [route.path.replace("{id:.+}", "tiny") for route in ROUTES if route.method == "GET"]
CONSOLE = ["/", "/console/static/app.js", "/console/events"]


def body_of(route: Route) -> dict[str, Any]:
    return {"model": "tiny", **(route.example or {})}


def message_of(answer: Answer) -> str:
    return str(answer.json()["error"]["message"])


def ids(route: Route) -> str:
    return route.path


@pytest.fixture(params=POSTS, ids=ids)
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.mark.parametrize("path", [*GETS, *CONSOLE, "/nothing", *[route.path for route in POSTS]])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_other_methods_are_answered_at_once(frontend: Frontend, method: str, path: str) -> None:
    """A HEAD of an event stream would never end."""
    answer = frontend.request(method, path)
    assert answer.status in (200, 404, 405, 503)
    if method != "HEAD":
        assert answer.status in (404, 405)
        answer.json()
    else:
        assert answer.body == b""
    if answer.status == 405:
        assert answer.headers["Allow"]
        assert method not in answer.headers["Allow"].split(", ")


@pytest.mark.parametrize("coding", ["gzip", "gzip, identity"])
def test_compressed_bodies_are_refused_everywhere(frontend: Frontend, route: Route, coding: str) -> None:
    body = gzip.compress(json.dumps(body_of(route)).encode())
    answer = frontend.request("POST", route.path, body, {"Content-Encoding": coding})
    assert (answer.status, "not supported" in message_of(answer)) == (415, True)


@pytest.mark.parametrize("codings", ["gzip, chunked", "Deflate,chunked", "gzip, gzip, chunked"])
@pytest.mark.parametrize("body", [b"", b"2\r\n{}\r\n"])
def test_transfer_codings_are_refused_everywhere(frontend: Frontend, route: Route, codings: str, body: bytes) -> None:
    """Nobody here undoes any but `chunked`: RFC 9112, section 6.1."""
    head = f"POST {route.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: {codings}\r\n\r\n"
    answer = frontend.raw(head.encode() + body + b"0\r\n\r\n", half_close=False)
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert f"the transfer coding '{codings.split(',')[0]}' is not supported".encode() in answer


@pytest.mark.parametrize(
    "target", ["CONNECT x:1", "GET http://x.y", "GET http://x.y?key=1", "GET /no?key=1", "OPTIONS *"]
)
def test_what_is_not_here_is_named(frontend: Frontend, target: str) -> None:
    """Targets without a path too: RFC 9112, section 3.2."""
    answer = frontend.raw(f"{target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), half_close=False)
    assert answer.startswith(b"HTTP/1.1 404 ")
    asked = target.split()[1].partition("?")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == f"there is no {asked} here"


def test_bodies_in_chunks_of_one_byte(frontend: Frontend, route: Route) -> None:
    body = json.dumps(body_of(route)).encode()
    chunks = b"".join(b"1;extension=x\r\n%c\r\n" % byte for byte in body)
    head = f"POST {route.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = frontend.raw(head.encode() + chunks + b"0\r\nTrailer: x\r\n\r\n", half_close=False)
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["x", "é"])
def test_bodies_are_utf_8_without_a_byte_order_mark(frontend: Frontend, route: Route, encoding: str, text: str) -> None:
    """RFC 8259, section 8.1."""
    body = json.dumps({**body_of(route), "user": text}, ensure_ascii=False).encode(encoding)
    answer = frontend.request("POST", route.path, body)
    assert (answer.status, "UTF-8" in message_of(answer)) == (400, True)


@pytest.mark.parametrize("body", [b"", b" \r\n\t"])
def test_empty_bodies(frontend: Frontend, route: Route, body: bytes) -> None:
    answer = frontend.request("POST", route.path, body)
    assert (answer.status, message_of(answer)) == (400, "the body is empty: it must be a JSON object")


@pytest.mark.parametrize(
    "value",
    [b"[" * 100_000 + b"]" * 100_000, b"[" * 100_000, b'{"a":' * 100_000],
    ids=["arrays", "open arrays", "open objects"],
)
def test_bodies_that_nest_too_deep(frontend: Frontend, route: Route, value: bytes) -> None:
    body = json.dumps(body_of(route)).encode()[:-1] + b',"unknown":' + value + b"}"
    answer = frontend.request("POST", route.path, body)
    assert (answer.status, message_of(answer)) == (400, "the body nests deeper than 64 levels")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "01", "1" * 400])
def test_numbers_that_are_none_or_too_large(frontend: Frontend, route: Route, number: str) -> None:
    name = "temperature" if "temperature" in route.body.__struct_fields__ else "model"
    body = json.dumps({**body_of(route), name: "#"}).replace('"#"', number)
    assert frontend.request("POST", route.path, body.encode()).status == 400


def test_the_last_of_two_equal_keys_counts(frontend: Frontend, route: Route) -> None:
    body = json.dumps(body_of(route))
    assert frontend.request("POST", route.path, f'{{"model":"nobody",{body[1:]}'.encode()).status == 200
    assert frontend.request("POST", route.path, f'{body[:-1]},"model":"nobody"}}'.encode()).status == 404


SECRET = "sk-5ecret"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (f"GET /{SECRET}{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n\r\n", "at most 8190 bytes"),
        (f"POST /v1/models?{SECRET}{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n\r\n", "at most 8190 bytes"),
        (f"GET / HTTP/1.1\r\nHost: x\r\nX: {SECRET}{'a' * 100_000}\r\n\r\n", "at most 8190 bytes"),
        (f"GET / HTTP/1.1\r\nHost: x\r\n{SECRET}{'a' * 100_000}: x\r\n\r\n", "at most 8190 bytes"),
        ("GET / HTTP/1.1\r\n" + "".join(f"X{at}: {SECRET}\r\n" for at in range(5000)) + "\r\n", "Too many headers"),
        (f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\0\r\n\r\n", "header value"),
        (f"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: {SECRET}\r\n\r\n", "Content-Length"),
        (f"{SECRET} / HTTP/1.1\r\nHost: x\r\n\r\n", "method"),
        (f"GET / HTTP/1.1\r\nHost: x\r\nBad {SECRET}: x\r\n\r\n", "header"),
        (f"GET / {SECRET}\r\n\r\n", ""),
    ],
    ids=["url", "query", "value", "name", "count", "zero", "length", "method", "space", "version"],
)
def test_a_broken_head_is_told_without_its_bytes(frontend: Frontend, data: str, told: str) -> None:
    head, _, body = frontend.raw(data.encode(), half_close=False).partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 400 ", head)
    message = json.loads(body)["error"]["message"]
    assert told in message
    assert SECRET not in message
    assert "\n" not in message
    assert "b'" not in message


def test_requests_sent_ahead_are_answered_in_order(frontend: Frontend, route: Route) -> None:
    """Pipelining, RFC 9112, section 9.3.2: also behind one that is refused."""
    body, bad = json.dumps(body_of(route)).encode(), b'{"model": 1}'
    bodies = [body, bad, body, bad]
    head = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\nConnection: {}\r\n\r\n"
    data = b"".join(
        head.format(route.path, len(body), "close" if at == 3 else "keep-alive").encode() + body
        for at, body in enumerate(bodies)
    )
    answer = frontend.raw(data, half_close=False)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"400", b"200", b"400"]


def test_http_1_0_with_and_without_keep_alive(frontend: Frontend, route: Route) -> None:
    body = json.dumps(body_of(route)).encode()
    head = f"POST {route.path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n".encode()
    kept = head + b"Connection: keep-alive\r\n\r\n" + body
    answer = frontend.raw(kept + kept + head + b"\r\n" + body, half_close=False)
    assert re.findall(rb"HTTP/1\.0 (\d+) ", answer) == [b"200"] * 3
    assert b"chunked" not in answer
