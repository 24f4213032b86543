"""What is on the other side, and what can be said to it beyond OpenAI's protocol."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace

import aiohttp
import msgspec
from msgspec import Struct
from zmq import ZMQError

from tools.loadgen.http import authorization
from tools.loadgen.messages import API_KEY_VARIABLE, ChunkTokens, Target
from tools.loadgen.sdk import connected, engine_client

# By the name that `/v1/models` gives as the owner.
SERVERS = ("tokenmill", "vllm", "llamacpp", "openai")
# Not the ids of vLLM: with those of the output come those of the prompt, in front of the first token.
_CHUNK_TOKENS: dict[str, ChunkTokens] = {"tokenmill": "ids", "vllm": "usage"}
_TIMEOUT = 10.0  # seconds, for what is asked before a run


class ServerError(Exception):
    """A server that cannot be used; the text is one line for the user."""


class _Model(Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class _Error(Struct, frozen=True):
    code: str | int | None = None


class _Refusal(Struct):
    error: _Error = _Error()


@dataclass(frozen=True, slots=True)
class Served:
    """`kind`: of `SERVERS`; `longest`: tokens of a prompt and its output, None where the server does not say.

    `measures`: it can tell timelines, which a tokenmill with --no-measure cannot.
    """

    kind: str
    model: str
    longest: int | None
    measures: bool = True


async def look(target: Target) -> Served:
    """Ask the server what it is. Raises `ServerError`."""
    return await _look_over_sdk(target) if target.endpoints else await _look_over_http(target)


def adapted(target: Target, served: Served, *, timings: bool) -> tuple[Target, list[str]]:
    """The target with what this server knows, and lines about what cannot be had from it."""
    kind = served.kind
    notes = []
    if kind in ("llamacpp", "openai"):
        notes.append(f"{kind}: tokens of a chunk are not told; ITL is of answers with one token in each chunk")
    if kind == "openai":
        notes.append("openai: no way is known to demand an output's length; answers may end earlier")
    if kind != "tokenmill":
        notes.append(f"{kind}: no timeline of its own; no queue time, no comparison with the server")
    elif timings and not served.measures:
        notes.append("the server was started with --no-measure: no timelines, no queue time, no comparison with it")
    found = msgspec.structs.replace(
        target,
        model=target.model or served.model,
        exact_output=kind != "openai",
        chunk_tokens=_CHUNK_TOKENS.get(kind, ""),
        tokenmill=kind == "tokenmill",
        timings=timings and kind == "tokenmill" and served.measures,
    )
    return found, notes


async def _look_over_sdk(target: Target) -> Served:
    try:
        client = engine_client(target)
    except ValueError as error:
        raise ServerError(str(error)) from None
    try:
        model = await connected(client, target)
    except ConnectionError as error:
        raise ServerError(str(error)) from None
    except ZMQError:
        addresses = ",".join(target.endpoints)
        raise ServerError(f"--sdk {addresses}: must be ZeroMQ addresses such as ipc:///tmp/tokenmill.sock") from None
    finally:
        await client.close()
    if target.model and target.model not in model.names:
        raise ServerError(f"--model {target.model}: not served there; the server has {', '.join(model.names)}")
    return Served("tokenmill", model.names[0], model.max_model_len)


async def _look_over_http(target: Target) -> Served:
    if not (os.environ.get(API_KEY_VARIABLE) or "-").isprintable():
        raise ServerError(f"{API_KEY_VARIABLE}: the key must not contain line breaks or other control characters")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT), headers=authorization()) as session,
            session.get(target.url + "/v1/models") as response,
        ):
            if response.status != 200:
                raise ServerError(f"--url {target.url}: /v1/models answers with {response.status}")
            models = msgspec.json.decode(await response.read(), type=_Models).data
            ours = any(model.owned_by == "tokenmill" for model in models)
            measures = not ours or await _measures(target, session)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ServerError(f"--url {target.url}: /v1/models is not what OpenAI's servers answer") from None
    except (
        aiohttp.InvalidURL,
        aiohttp.NonHttpUrlClientError,
        UnicodeError,
    ):  # the last of a host that DNS cannot ask for
        raise ServerError(f"--url {target.url}: this is no address of a server") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServerError(f"--url {target.url}: {error or type(error).__name__}") from None
    if not models:
        raise ServerError(f"--url {target.url}: it serves no model")
    found = next((model for model in models if model.id == target.model or not target.model), None)
    if found is None:
        names = ", ".join(model.id for model in models)
        raise ServerError(f"--model {target.model}: not served there; the server has {names}")
    owner = found.owned_by
    return Served(owner if owner in SERVERS else "openai", found.id, found.max_model_len or None, measures)


async def _measures(target: Target, session: aiohttp.ClientSession) -> bool:
    """Whether the server can tell timelines, as far as it says: asking one that cannot for them would be refused."""
    async with session.get(target.url + "/debug/requests", params={"limit": "1"}) as response:
        body = await response.read()
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body, type=_Refusal).error.code != "not_measured"
    return True


def as_kind(served: Served, kind: str) -> Served:
    """With what the user says of it; "auto" leaves what was found."""
    return served if kind == "auto" else replace(served, kind=kind)
