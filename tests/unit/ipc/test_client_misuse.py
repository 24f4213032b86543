"""The SDK's clients where they cannot work: other processes, other loops, wrong addresses, servers of another kind."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from ipc import AsyncClient, BadRequest, Cancelled, Client, RequestFailed, Unavailable, channels
from ipc.messages import Tokenize
from tests.unit.ipc.fake_tokenizer import FakeTokenizer, served
from tests.unit.ipc.test_channels import until

PATIENCE = 10.0  # seconds; only reached when something is broken


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/tokenizer"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "socket",
        "/run/a.sock",
        "http://127.0.0.1:8000",
        "inproc://a",
        "ipc://",
        "ipc:///tmp/a\0b",
        "ipc:///tmp/\ud800",
        "ipc:///" + 107 * "x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:\u0661",
        "tcp://:1",
        "tcp://::1:7000",
        "tcp://*:7000",
        "tcp://user@host:7000",
        "tcp://h\u00f6st:7000",
        b"ipc:///tmp/a",
        Path("/tmp/a"),
        5,
        None,
        [],
        [5],
        ["ipc:///tmp/a", ""],
    ],
    ids=ascii,
)
def test_what_is_no_address_is_refused_at_once(address: Any) -> None:
    with pytest.raises(ValueError, match="address"):
        AsyncClient(address)
    before = threading.active_count()
    with pytest.raises(ValueError, match="address"):
        Client(address)
    assert threading.active_count() == before


@pytest.mark.parametrize("address", ["ipc:///a", "ipc://@abstract", "tcp://[::1]:7000", "tcp://host.example:65535"])
def test_addresses(address: str) -> None:
    AsyncClient(address)
    AsyncClient((address, address))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"retries": -1}, "retries"), ({"retries": "x"}, "retries"), ({"deadline": 0}, "deadline")]
    + [({"deadline": value}, "deadline") for value in (-1, float("nan"), float("inf"), "1", True)],
    ids=repr,
)
def test_options_of_a_client_are_checked_when_it_is_made(endpoint: str, options: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AsyncClient(endpoint, **options)


def in_child(action: Any) -> str:
    """What `action` returns, or raises, in a forked process; nothing when it hangs."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            said = repr(action())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_blocking_client_says_that_it_does_not_survive_a_fork(endpoint: str) -> None:
    with served(endpoint), Client(endpoint, timeout=5) as client:
        stream = client.stream("a b")
        for call in (lambda: client.generate("a"), lambda: client.tokenize("a"), lambda: list(stream)):
            assert in_child(call).startswith("RuntimeError: this client was made in another process")
        assert in_child(client.close) == "None"
        assert client.generate("a").text == "a"  # the parent's goes on


def test_an_asyncio_client_says_that_it_does_not_survive_a_fork(endpoint: str) -> None:
    def drive(work: Any) -> object:
        return work.send(None)

    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        async with asyncio.timeout(PATIENCE), AsyncClient(endpoint) as client:
            for call in (lambda: client.generate("a"), lambda: client.detokenize([1]), client.connect):
                said = in_child(lambda call=call: drive(call()))
                assert said.startswith("RuntimeError: this client was made in another process")
            assert (await client.generate("a")).text == "a"
        tokenizer.router.close()

    asyncio.run(main())


def test_a_client_says_that_it_belongs_to_another_loop(endpoint: str) -> None:
    with served(endpoint) as tokenizer:
        client = AsyncClient(endpoint)
        assert asyncio.run(client.generate("a")).text == "a"
        calls = (lambda: client.generate("a"), lambda: client.embed("a"), lambda: client.tokenize("a"), client.connect)
        for call in calls:
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(asyncio.wait_for(call(), PATIENCE))  # type: ignore[arg-type]
        assert len(tokenizer.asked) == 1


def test_no_call_is_left_behind_by_a_client_that_closes(endpoint: str) -> None:
    with served(endpoint):
        for _ in range(20):
            client = Client(endpoint, timeout=5)
            ended: list[type[BaseException]] = []

            def call(client: Client = client, ended: list[type[BaseException]] = ended) -> None:
                try:
                    while True:
                        client.generate("a")
                except RequestFailed as error:
                    ended.append(type(error))

            threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            closing = [threading.Thread(target=client.close) for _ in range(2)]
            for thread in closing:
                thread.start()
            for thread in threads + closing:
                thread.join(PATIENCE)
            assert ended == [Cancelled] * 4


def test_a_question_too_large_for_the_connection_breaks_no_other_call(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        async with asyncio.timeout(PATIENCE), AsyncClient(endpoint) as client:
            other = asyncio.create_task(client.generate("hang"))
            await until(lambda: len(tokenizer.asked) == 1)
            with pytest.raises(BadRequest, match="at most 1048576 bytes"):
                await client.tokenize("x" * (70 << 20))
            with pytest.raises(BadRequest, match="at most 262144 entries"):
                await client.detokenize(range(20_000_000))
            for flag in ("add_special_tokens", "return_token_strs"):
                with pytest.raises(BadRequest, match="must be true or false") as caught:
                    await client.tokenize("a", **{flag: "yes"})  # type: ignore[arg-type]
                assert caught.value.param == flag
            for pooling in (None, 5, "sum", ["mean"]):
                with pytest.raises(BadRequest) as caught:
                    await client.embed("a", pooling)  # type: ignore[arg-type]
                assert caught.value.param == "pooling"
            assert (await client.tokenize("ab")).token_ids == (97, 98)
            assert not other.done()
            other.cancel()
        assert len(tokenizer.asked) == 1
        tokenizer.router.close()

    asyncio.run(main())


def test_calls_go_on_when_the_server_has_cut_the_client_off(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        async with asyncio.timeout(PATIENCE), AsyncClient(endpoint) as client:
            waiting = asyncio.create_task(client.generate("hang", retries=0))
            await until(lambda: len(tokenizer.asked) == 1)
            client._engine._links[0].dealer.send(Tokenize("no number", "no prompt"))  # type: ignore[arg-type]
            with pytest.raises(Unavailable, match="lost"):
                await waiting
            assert (await client.generate("a b")).text == "ab"
        tokenizer.router.close()

    asyncio.run(main())


def test_a_server_of_another_version_is_an_error_and_not_a_silence(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_NEXT_HANDSHAKE_SECONDS", 0.01)

    async def main() -> None:
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.set(zmq.ROUTER_HANDOVER, 1)
        router.bind(endpoint)

        async def answer() -> None:
            while True:
                while not router.poll(0):
                    await asyncio.sleep(0.002)
                peer, header, _ = router.recv_multipart()
                router.send_multipart((peer, header[:8] + bytes(8), b"\x91\xa4News"))

        answering = asyncio.create_task(answer())
        client = AsyncClient(endpoint)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(Unavailable, match="another version"):
                await client.connect()
            with pytest.raises(Unavailable, match="another version"):
                await client.generate("a")
            await client.close()
        answering.cancel()
        router.close(0)

    asyncio.run(main())


def test_what_is_no_server_of_ours_is_not_taken_for_one_with_keys() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def break_off() -> None:
        listener.settimeout(0.05)
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

    thread = threading.Thread(target=break_off)
    thread.start()
    try:
        with pytest.raises(RequestFailed, match="no server for clients of the SDK"):
            Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE)
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_the_names_of_the_package_can_be_listed_and_imported_together() -> None:
    import ipc
    from ipc import sdk

    assert set(sdk.__all__) <= set(dir(ipc))
    assert ipc.__all__ == sdk.__all__
