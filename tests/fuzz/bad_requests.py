"""Requests that should not be: mutations of good ones, and bytes that are hardly HTTP."""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}, "required": ["city"]}

Good = Sequence[tuple[str, dict[str, Any]]]
GOOD: Good = [
    ("/v1/chat/completions", {"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "model": "smol",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief é\n"}]},
                {"role": "user", "content": "Hi", "name": "me"},
            ],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["a", "bc"],
            "logit_bias": {"5": -100},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "seed": 7,
        },
    ),
    (
        "/v1/completions",
        {
            "model": "smol",
            "prompt": [[1, 2, 3], [4]],
            "max_tokens": 2,
            "logprobs": 2,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "stop_token_ids": [2],
            "min_tokens": 1,
        },
    ),
    ("/v1/completions", {"model": "smol", "prompt": ["Once", "upon"], "max_tokens": 2, "priority": 1}),
    (
        "/v1/chat/completions",
        {
            "model": "smol",
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}],
            "tool_choice": "auto",
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "smol",
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}},
            "max_tokens": 2,
        },
    ),
    ("/v1/embeddings", {"model": "smol", "input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/responses", {"model": "smol", "input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 16}),
    (
        "/v1/messages",
        {"model": "smol", "system": "Be brief", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    ),
    ("/tokenize", {"model": "smol", "prompt": "Once upon"}),
    ("/detokenize", {"model": "smol", "tokens": [1, 2, 3]}),
]

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    0.5,
    1e308,
    -1e-320,
    "",
    "x",
    "x" * 5000,
    "\x00",
    "\ud83d",
    '{"city": "\\ud83d"}',
    "\U0001f600" * 300,
    "(a|a)*" * 20,
    [],
    [[]],
    [None],
    [0] * 3000,
    ["a"] * 200,
    {},
    {"a": {"b": []}},
    {"": None},
    {str(at): 1 for at in range(1100)},
]
WORDS = [b"NaN", b"Infinity", b"-", b"1e999", b"null", b"\xff", b"\\ud83d", b"\x00", b'"', b"[" * 80, b"{", b",", b"e"]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body something could be replaced."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


def mutated_value(rng: random.Random, requests: Good) -> tuple[str, bytes]:
    """A good body in which one or two values are others, missing, or there twice under another name."""
    path, good = rng.choice(requests)
    body = copy.deepcopy(good)
    for _ in range(rng.randint(1, 2)):
        *above, last = rng.choice([where for where in paths_in(body) if where])
        inside = body
        for key in above:
            inside = inside[key]
        if rng.random() < 0.15 and isinstance(inside, dict):
            inside[f"{last}_"] = inside.pop(last)
        else:
            inside[last] = copy.deepcopy(rng.choice(VALUES))
    return path, json.dumps(body).encode()


def mutated_bytes(rng: random.Random, requests: Good) -> tuple[str, bytes]:
    """A good body in which some bytes are others."""
    path, good = rng.choice(requests)
    body = json.dumps(good).encode()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        body = body[:at] + rng.choice([*WORDS, rng.randbytes(3)]) + body[at + rng.randrange(6) :]
    return path, body


def raw_bytes(rng: random.Random, requests: Good) -> bytes:
    """What a socket may get: a request with a damaged head, a wrong length, a broken coding; or noise."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(300))
    path, good = rng.choice(requests)
    body = json.dumps(good).encode()
    head = {
        b"Host": b"x",
        b"Connection": b"close",
        b"Content-Type": rng.choice([b"application/json", b"text/plain", b"multipart/form-data", b"\xff"]),
        b"Content-Length": str(len(body) + rng.choice([0, 0, 0, 0, -5, 5, 10**9, 10**30])).encode(),
        b"x-request-id": rng.choice([b"good"] * 12 + [b"", b"\xed\xa0\xbd", b"a" * 200]),
    }
    if rng.random() < 0.3:
        del head[b"Content-Length"]
        head[b"Transfer-Encoding"] = rng.choice([b"chunked", b"gzip, chunked", b"chunked, chunked"])
        body = rng.choice(
            [b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n"]
        )
    if rng.random() < 0.3:
        head[rng.choice([b"Content-Encoding", b"Expect", b"Upgrade", b"Authorization", b"Range"])] = rng.choice(
            [b"gzip", b"100-continue", b"websocket", b"Bearer \xff", b"bytes=0-1", b""]
        )
    method = rng.choice([b"POST", b"POST", b"POST", b"PUT", b"OPTIONS", b"BREW", b"post", b"P\x00ST"])
    version = rng.choice([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""])
    lines = [b"%b %b %b" % (method, path.encode(), version), *(b": ".join(item) for item in head.items())]
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(4) :]
    return data
