"""Whatever a client sends, it gets an error object of the 4xx kind, and the frontend goes on."""

import hashlib
import json
import re
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..fake_engine import MODEL, FakeEngine
from .process import Answer, Frontend

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GOOD_TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


def check_id(answer: Answer) -> None:
    assert 1 <= len(answer.headers["x-request-id"]) <= 128


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v2/models", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", TEXT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health/live", 405),
        ("GET", "/v1/models/%00%ff", 404),
        ("GET", "/" + "a" * 5000, 404),
    ],
)
def test_wrong_routes_get_error_objects(frontend: Frontend, method: str, path: str, status: int) -> None:
    answer = frontend.request(method, path)
    assert answer.status == status
    answer.error()
    check_id(answer)
    if status == 405:
        assert answer.headers["Allow"]


def test_request_ids_come_back(frontend: Frontend, engine: FakeEngine) -> None:
    given = "trace 42/~" + "x" * 118
    for stream in (False, True):
        answer = frontend.request("POST", CHAT, {**GOOD_CHAT, "stream": stream}, {"x-request-id": given})
        assert answer.headers["x-request-id"] == given
    engine.wait_for_request(given)
    assert frontend.request("GET", "/nothing", headers={"x-request-id": given}).headers["x-request-id"] == given
    ids = {frontend.request("GET", "/health/live").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("bad", ["x" * 129, "é", "\x7f", "a\tb", "\ud83d", ""], ids=ascii)
def test_b053_bad_request_ids_are_refused(frontend: Frontend, bad: str) -> None:
    body = json.dumps(GOOD_CHAT).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\nx-request-id: "
    data = frontend.raw(head.encode() + bad.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body, half_close=False)
    start, _, rest = data.partition(b"\r\n")
    headers, _, error = rest.partition(b"\r\n\r\n")
    assert start.split()[1] == b"400"
    assert re.search(rb"(?i)^x-request-id: [0-9a-f]{32}$", headers.replace(b"\r", b""), re.MULTILINE)
    assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}


def test_ignored_fields_are_named(frontend: Frontend) -> None:
    assert "x-tokenmill-ignored" not in frontend.request("POST", CHAT, GOOD_CHAT).headers
    odd = {"a,b": 1, "é\r\nset-cookie: x": 2, "plain": None}
    for stream in (False, True):
        answer = frontend.request("POST", CHAT, {**GOOD_CHAT, **odd, "stream": stream})
        assert answer.status == 200
        assert answer.headers["x-tokenmill-ignored"] == "a%2Cb,%C3%A9%0D%0Aset-cookie%3A%20x,plain"
    many = {f"f{at}" + "y" * 100_000: at for at in range(3)} | {f"g{at}": at for at in range(50)}
    answer = frontend.request("POST", CHAT, {**GOOD_CHAT, **many})
    assert answer.status == 200
    assert len(answer.headers["x-tokenmill-ignored"].split(",")) == 20
    refused = frontend.request("POST", CHAT, {**GOOD_CHAT, "bogus": 1, "n": 0})
    assert (refused.status, refused.headers["x-tokenmill-ignored"]) == (400, "bogus")
    for path, body in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT)):
        answer = frontend.request("POST", path, {**body, "x": 1, "store": True})
        assert (answer.status, answer.headers["x-tokenmill-ignored"]) == (200, "x,store")


def test_ignored_fields_are_named_at_every_level(frontend: Frontend) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "weight": 1}] * 3
    answer = frontend.request("POST", CHAT, {**GOOD_CHAT, "messages": messages, "stream_options": None, "x": {"y": 1}})
    assert answer.status == 200
    assert answer.headers["x-tokenmill-ignored"] == "messages.content.cache_control,messages.weight,x"


def test_of_a_key_that_stands_twice_the_last_counts(frontend: Frontend, engine: FakeEngine) -> None:
    body = b'{"model":"nobody","prompt":"a","max_tokens":0,"max_tokens":3,"model":"tiny"}'
    assert frontend.request("POST", TEXT, body, {"x-request-id": "double"}).status == 200
    assert engine.wait_for_request("double").params.max_tokens == 3


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "?", ""]
)
def test_the_content_type_does_not_matter(frontend: Frontend, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    assert frontend.request("POST", TEXT, json.dumps(GOOD_TEXT).encode(), headers).status == 200
    refused = frontend.request("POST", TEXT, b"prompt=hi&model=tiny", headers)
    assert (refused.status, "JSON" in refused.error()["message"]) == (400, True)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a"}] * 4097, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": "n" * 129}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0]"),
    ],
    ids=["messages", "parts", "name", "image", "audio"],
)
def test_conversations_are_bounded(frontend: Frontend, messages: list[Any], param: str) -> None:
    answer = frontend.request("POST", CHAT, {**GOOD_CHAT, "messages": messages})
    assert (answer.status, answer.error()["param"]) == (400, param)


def test_bodies_beyond_the_limit(frontend: Frontend) -> None:
    for body in (b"x" * ((1 << 20) + 1), b'{"model":"' + b"x" * (3 << 20) + b'"}'):
        answer = frontend.request("POST", CHAT, body)
        assert answer.status == 413
        assert "1048576" in answer.error()["message"]
    padding = {**GOOD_CHAT, "metadata": {"x": "y" * 1_000_000}}
    assert frontend.request("POST", CHAT, padding).status == 200
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    assert frontend.raw(head + part * 17 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413 ")


def test_compressed_bodies_are_refused(frontend: Frontend) -> None:
    answer = frontend.request("POST", CHAT, b"\x1f\x8b\x08\x00", {"Content-Encoding": "gzip"})
    assert answer.status == 415
    answer.error()


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health/live"])
def test_unknown_expectations_get_an_error_object(frontend: Frontend, path: str) -> None:
    body = GOOD_CHAT if path == CHAT else None
    answer = frontend.request("POST" if body else "GET", path, body, {"Expect": "a-miracle", "x-request-id": "hopeful"})
    assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (417, "application/json")
    assert "100-continue" in answer.error()["message"]
    assert answer.headers["x-request-id"] == "hopeful"


def test_a_client_that_waits_for_100_continue_is_asked_for_its_body(frontend: Frontend) -> None:
    body = json.dumps(GOOD_CHAT).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
        stream = connection.makefile("rb")
        assert (stream.readline(), stream.readline()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
        connection.sendall(body)
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("where", ["content", "name", "stop", "model", "unknown", "role"])
@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("escape", [r"\ud83d", r"\ude00", r"\ud83d\ud83d", r"a\udfffb"])
def test_b053_lone_surrogates(frontend: Frontend, where: str, stream: str, escape: str) -> None:
    texts = dict.fromkeys(["content", "name", "stop", "unknown"], "x") | {"model": "tiny", "role": "user"}
    texts[where] = escape
    body = (
        f'{{"model":"{texts["model"]}","messages":[{{"role":"{texts["role"]}","content":"{texts["content"]}",'
        f'"name":"{texts["name"]}"}}],"stop":"{texts["stop"]}","unknown":"{texts["unknown"]}","stream":{stream}}}'
    )
    answer = frontend.request("POST", CHAT, body.encode())
    assert answer.status == 400
    assert "Error" not in answer.error()["message"]


def test_b053_a_whole_pair_is_a_character(frontend: Frontend, engine: FakeEngine) -> None:
    body = rb'{"model":"tiny","prompt":"\ud83d\ude00","max_tokens":2}'
    assert frontend.request("POST", TEXT, body, {"x-request-id": "pair"}).status == 200
    assert engine.wait_for_request("pair").prompt.text == "\U0001f600"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "prompt", [[[-1]], [-1], [2**31], [MODEL.vocab_size], [True], [1.5], "", [], [""], [[]]], ids=str
)
def test_b049_b051_bad_prompts_name_the_prompt(frontend: Frontend, prompt: Any) -> None:
    answer = frontend.request("POST", TEXT, {**GOOD_TEXT, "prompt": prompt})
    assert answer.status == 400
    assert (answer.error()["param"] or "").startswith("prompt")


def test_b049_b050_the_last_id_is_accepted(frontend: Frontend) -> None:
    assert frontend.request("POST", TEXT, {**GOOD_TEXT, "prompt": [0, MODEL.vocab_size - 1]}).status == 200


def test_b048_echo_of_token_ids(frontend: Frontend) -> None:
    for prompt in ([1, 15], [[1, 3], [15, 3]]):
        answer = frontend.request("POST", TEXT, {**GOOD_TEXT, "prompt": prompt, "echo": True})
        assert answer.status == 200
        assert all(choice["text"].startswith("p0p1 é0.0") for choice in answer.json()["choices"])


BAD_FIELDS = [
    ("priority", -1_000_001, "between -1000000 and 1000000"),
    ("priority", 1_000_001, "between -1000000 and 1000000"),
    ("priority", 2**70, ""),
    ("priority", 0.5, "int"),
    ("priority", True, "int"),
    ("priority", "0", "int"),
    ("ttft_target_ms", 0, "between 1 and 3600000"),
    ("ttft_target_ms", -5, "between 1 and 3600000"),
    ("ttft_target_ms", 3_600_000.5, "between 1 and 3600000"),
    ("ttft_target_ms", 1e308, "between 1 and 3600000"),
    ("ttft_target_ms", "9", "float"),
    ("cache_pin_seconds", -0.1, "between 0 and 3600"),
    ("cache_pin_seconds", 3600.1, "between 0 and 3600"),
    ("cache_pin_seconds", [], "float"),
    ("stop_on_loop", -1, "between 0 and 1000"),
    ("stop_on_loop", 1, "between 2 and 1000"),
    ("stop_on_loop", 1001, "between 0 and 1000"),
    ("stop_on_loop", 2.5, "int"),
    ("cache_salt", "s" * 257, "at most 256 characters"),
    ("cache_salt", 7, "str"),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD_FIELDS, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_scheduling_fields_name_parameter_and_limit(
    frontend: Frontend, engine: FakeEngine, name: str, value: Any, limit: str, stream: bool
) -> None:
    before = len(engine.requests)
    for path, good in ((CHAT, GOOD_CHAT), (TEXT, {**GOOD_TEXT, "prompt": ["a", "b"]})):
        answer = frontend.request("POST", path, {**good, name: value, "stream": stream})
        assert (answer.status, answer.error()["param"]) == (400, name)
        assert name in answer.error()["message"]
        assert limit in answer.error()["message"]
    assert len(engine.requests) == before, "nothing is asked of the engine"


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity", "-1e999"])
@pytest.mark.parametrize("name", ["ttft_target_ms", "cache_pin_seconds"])
def test_numbers_that_are_not_finite_are_refused(frontend: Frontend, name: str, number: str) -> None:
    body = json.dumps({**GOOD_TEXT, name: "#"}).replace('"#"', number)
    answer = frontend.request("POST", TEXT, body.encode())
    assert answer.status == 400
    answer.error()


KEY_A, KEY_B = (hashlib.sha256(key).hexdigest()[:16] for key in (b"key-a", b"key-b"))
SALT = hashlib.sha256(b"salt").hexdigest()[:48]


@pytest.mark.parametrize(
    ("header", "salt", "tenant", "namespace"),
    [
        (None, None, "", ""),
        (None, "salt", "", f":{SALT}"),
        ("Bearer key-a", None, KEY_A, KEY_A),
        ("bearer key-a", "salt", KEY_A, f"{KEY_A}:{SALT}"),
        ("Bearer key-b", "salt", KEY_B, f"{KEY_B}:{SALT}"),
        ("Basic key-a", "salt", "", f":{SALT}"),
        ("Bearer", None, "", ""),
        ("Bearer  ", None, "", ""),
        ("", None, "", ""),
        ("Bearer " + "k" * 4000, "s" * 256, None, None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_key_and_salt_make_tenant_and_namespace(
    frontend: Frontend, engine: FakeEngine, header: str | None, salt: str | None, tenant: str | None, namespace: str
) -> None:
    name = f"tenant-{len(engine.requests)}"
    headers = {"x-request-id": name} | ({} if header is None else {"Authorization": header})
    assert frontend.request("POST", TEXT, {**GOOD_TEXT, "cache_salt": salt}, headers).status == 200
    request = engine.wait_for_request(name)
    if tenant is not None:
        assert (request.tenant, request.namespace) == (tenant, namespace)
    else:
        assert (len(request.tenant), len(request.namespace)) == (16, 16 + 1 + 48), "bounded, whatever was sent"


RAW = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: a-miracle\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //x:y@z:99999/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_request(frontend: Frontend, data: bytes) -> None:
    answer = frontend.raw(data)
    # Nothing at all where the end of the bytes is the end of the connection before the request is whole.
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
    assert b"Traceback" not in answer
    assert frontend.request("GET", "/health/ready").status == 200


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_raw_bytes(frontend: Frontend, data: bytes) -> None:
    answer = frontend.raw(data)
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert b"Traceback" not in answer


_seeds = [
    json.dumps(body).encode()
    for body in (
        {**GOOD_CHAT, "stream": True, "stop": ["a"], "logit_bias": {"1": 2}, "temperature": 0.5},
        {**GOOD_CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "é\n"}]}], "n": 2},
        {**GOOD_TEXT, "prompt": [[1, 2], [3]], "logprobs": 2, "seed": 1},
    )
]
_mutation = st.tuples(
    st.integers(0, 300), st.integers(0, 8), st.binary(max_size=6) | st.sampled_from([b"-", b"[", b"1e9", b"null"])
)


@given(st.sampled_from(_seeds), st.lists(_mutation, min_size=1, max_size=4), st.sampled_from([CHAT, TEXT]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_bodies(
    frontend: Frontend,
    seed: bytes,
    mutations: list[tuple[int, int, bytes]],
    path: str,
) -> None:
    body = seed
    for at, cut, insert in mutations:
        at %= len(body) + 1
        body = body[:at] + insert + body[at + cut :]
    answer = frontend.request("POST", path, body)
    assert answer.status in (200, 400, 404)
    check_id(answer)
    if answer.status != 200:
        answer.error()
