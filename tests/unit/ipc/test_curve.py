"""CURVE over TCP: key files, who is let in, and what those hear who are not."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from ipc import AsyncClient, AuthenticationFailed, Client
from ipc.channels import AsyncRouter, BindError
from ipc.codec import Decoder, encode
from ipc.curve import ServerKeys, new_key_pair
from ipc.key_files import KeyPair, check_server_key, key_line, read_allowed_keys, read_key_file, write_key_file
from ipc.messages import Abort, Hello, ToTokenizer
from ipc.sessions import Outbound, new_incarnation
from ipc.zap import Authenticator
from launch.listen import free_loopback_port
from tests.key_files import make_key_file
from tests.unit.ipc.fake_tokenizer import FakeTokenizer
from tests.unit.ipc.test_channels import until

REPOSITORY = Path(__file__).resolve().parents[3]


class Keys:
    """A server's keys, the files of one client that it knows and of one that it does not."""

    def __init__(self, folder: Path) -> None:
        self.server = new_key_pair()
        self.known, self.unknown = folder / "known.key", folder / "unknown.key"
        self.allowed = {make_key_file(self.known).public: "team"}
        make_key_file(self.unknown)
        self.address = f"tcp://127.0.0.1:{free_loopback_port()}"

    @property
    def server_key(self) -> str:
        return self.server.public.decode()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeTokenizer]:
        authenticator = Authenticator(self.allowed)
        authenticator.start()
        tokenizer: FakeTokenizer | None = None
        try:
            while tokenizer is None:
                # ZeroMQ closes the port of a predecessor in the background.
                with contextlib.suppress(BindError):
                    tokenizer = FakeTokenizer(self.address, remote=True, keys=ServerKeys(self.server, self.allowed))
                await asyncio.sleep(0.01)
            yield tokenizer
        finally:
            if tokenizer is not None:
                tokenizer.router.close()
            authenticator.close()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_a_known_client_is_served_and_keeps_its_name_over_restarts(keys: Keys) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            async with keys.serving() as tokenizer:
                client = AsyncClient(keys.address, key=keys.known, server_key=keys.server_key)
                await client.connect(10)
                assert (await client.generate("a b")).text == "ab"
                (peer,) = tokenizer.router._inbound
                assert tokenizer.router.user_of(peer) == "team"
                waiting = asyncio.create_task(client.generate("hang"))
                await until(lambda: len(tokenizer.asked) == 2)
            async with keys.serving() as successor:
                await until(lambda: len(successor.asked) == 1)
                waiting.cancel()
                assert (await client.generate("c")).text == "c"
                await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["unknown client", "another server", "client without keys", "server without keys"])
def test_whoever_has_not_the_right_key_hears_it_soon(keys: Keys, how: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            async with contextlib.AsyncExitStack() as stack:
                if how == "server without keys":
                    tokenizer = FakeTokenizer(keys.address, remote=True)
                    stack.callback(tokenizer.router.close)
                else:
                    tokenizer = await stack.enter_async_context(keys.serving())
                key = keys.unknown if how == "unknown client" else keys.known
                server_key = new_key_pair().public.decode() if how == "another server" else keys.server_key
                if how == "client without keys":
                    client = AsyncClient(keys.address)
                else:
                    client = AsyncClient(keys.address, key=key, server_key=server_key)
                said = {"unknown client": "does not know this client's key", "another server": "public key is another"}
                with pytest.raises(AuthenticationFailed, match=said.get(how, "only one side")) as caught:
                    await client.connect(None)
                assert caught.value.status == 401
                with pytest.raises(AuthenticationFailed):
                    await client.generate("a")
                assert not tokenizer.asked
                await client.close()

    asyncio.run(main())


def test_the_blocking_client_hears_it_too(keys: Keys) -> None:
    async def main() -> None:
        async with keys.serving():
            with pytest.raises(AuthenticationFailed):
                await asyncio.to_thread(Client, keys.address, key=keys.unknown, server_key=keys.server_key)

    asyncio.run(main())


def test_a_client_is_let_in_once_its_key_is_known(keys: Keys) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            client = AsyncClient(keys.address, key=keys.unknown, server_key=keys.server_key)
            async with keys.serving():
                with pytest.raises(AuthenticationFailed):
                    await client.connect(10)
            keys.allowed[read_key_file(keys.unknown).public] = "newcomer"
            async with keys.serving():
                async with asyncio.timeout(10):
                    while client.model is None:
                        await asyncio.sleep(0.01)
                assert (await client.generate("a")).text == "a"
            await client.close()

    asyncio.run(main())


def test_another_client_cannot_take_over_a_session_by_its_name(keys: Keys) -> None:
    second = new_key_pair()
    keys.allowed[second.public] = "second"

    def raw(own: KeyPair) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IDENTITY, b"same")
        socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
        socket.curve_serverkey = keys.server.public
        socket.connect(keys.address)
        return socket

    async def main() -> None:
        heard: list[tuple[str, ToTokenizer]] = []
        lost: list[bytes] = []
        authenticator = Authenticator(keys.allowed)
        authenticator.start()
        router: AsyncRouter[ToTokenizer] = AsyncRouter(
            keys.address,
            Decoder(ToTokenizer),
            new_incarnation(),
            lambda peer, message: heard.append((router.user_of(peer), message)),
            lost.append,
            remote=True,
            keys=ServerKeys(keys.server, keys.allowed),
        )
        router.start()
        first = raw(read_key_file(keys.known))
        link = Outbound(new_incarnation())
        first.send_multipart(link.frame(encode(Hello("first"))))
        await until(lambda: len(heard) == 1)
        thief = raw(second)
        thief.send_multipart(Outbound(new_incarnation()).frame(encode(Hello("second"))))
        await asyncio.sleep(0.3)
        first.send_multipart(link.frame(encode(Abort(1))))
        await until(lambda: len(heard) == 2)
        assert heard == [("team", Hello("first")), ("team", Abort(1))]
        assert lost == []
        first.close()
        await until(lambda: lost == [b"same"])
        thief.close()
        router.close()
        authenticator.close()

    asyncio.run(main())


# --- files ---


def test_a_key_file_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "client.key"
    before = os.umask(0)
    try:
        made = make_key_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path) == made
    assert zmq.curve_public(made.secret) == made.public
    assert made.secret.decode() not in repr(made)
    with pytest.raises(FileExistsError):
        write_key_file(path, new_key_pair())
    assert read_key_file(path) == made


def keygen(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ipc", "keygen", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_keygen_makes_what_both_sides_read(tmp_path: Path) -> None:
    allowed, file = tmp_path / "clients.txt", tmp_path / "client.key"
    done = keygen(str(file), "team-a")
    assert done.returncode == 0, done.stderr
    secret = read_key_file(file).secret.decode()
    assert secret not in done.stdout + done.stderr
    allowed.write_text("# clients\n\n" + done.stdout)
    assert read_allowed_keys(allowed) == {read_key_file(file).public: "team-a"}
    server = keygen(str(tmp_path / "server.key"))
    assert check_server_key(server.stdout.strip()) == read_key_file(tmp_path / "server.key").public


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("FILE",), 1, "File exists"),
        (("FILE/client.key",), 1, "Not a directory"),
        (("NEW", "not a name"), 2, "at most 64 letters"),
        ((), 2, "required"),
    ],
)
def test_keygen_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], status: int, said: str) -> None:
    (tmp_path / "file").write_text("precious")
    names = {"FILE": str(tmp_path / "file"), "NEW": str(tmp_path / "new")}
    done = keygen(*(argument.replace("FILE", names["FILE"]).replace("NEW", names["NEW"]) for argument in arguments))
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "precious"
    assert not (tmp_path / "new").exists()


# Always the same one: it is in the names of tests.
GOOD = key_line(z85.encode(bytes(range(32))), "a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        (f"{GOOD}\nnonsense", "line 2: expected curve:"),
        (f"{GOOD} b", "line 1: expected curve:"),
        (GOOD.replace("curve:", ""), "line 1: expected curve:"),
        (GOOD[:-3] + " a", "line 1: expected curve:"),
        (f"curve:{40 * '#'} a", "line 1: expected curve:"),
        (f"{GOOD}\n{GOOD}b", "line 2: this key has another name"),
        ("\u00e9", "not a text file of keys"),
    ],
)
def test_a_list_that_cannot_be_used(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "clients.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_allowed_keys(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("digits", ["%nSc1", "#####", "%nSc0"])
def test_five_characters_of_a_key_are_at_most_32_bits(digits: str) -> None:
    """RFC 32 of ZeroMQ: `%nSc0` is 2^32 - 1, in a base of 85."""
    key = 35 * "0" + digits
    if digits == "%nSc0":
        assert z85.decode(check_server_key(key)) == 28 * b"\0" + 4 * b"\xff"
        return
    with pytest.raises(ValueError, match="a public key has 40 characters"):
        check_server_key(key)


@pytest.mark.parametrize("content", ["", "public x\nsecret y\n", GOOD])
def test_a_key_file_that_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "client.key"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no key pair"):
        read_key_file(path)
    with pytest.raises(ValueError, match="No such file"):
        read_key_file(tmp_path / "none")


@given(st.binary(min_size=32, max_size=32))
def test_every_key_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    from zmq.utils import z85

    public = z85.encode(raw)
    path = tmp_path_factory.getbasetemp() / "any-clients.txt"
    path.write_text(key_line(public, "n"))
    assert read_allowed_keys(path) == {public: "n"}
    assert check_server_key(public.decode()) == public


def test_half_of_the_keys_is_refused() -> None:
    for options in ({"key": "file"}, {"server_key": "k"}):
        with pytest.raises(ValueError, match="give both"):
            AsyncClient("tcp://127.0.0.1:1", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="40 characters"):
        check_server_key("short")


def test_an_endpoint_that_is_taken_is_said(tmp_path: Path) -> None:
    port = free_loopback_port()
    router = [AsyncRouter(f"tcp://127.0.0.1:{port}", Decoder(ToTokenizer), 1, lambda p, m: None, lambda p: None)]
    with pytest.raises(BindError, match=f"tcp://127.0.0.1:{port}: Address already in use"):
        AsyncRouter(f"tcp://127.0.0.1:{port}", Decoder(ToTokenizer), 1, lambda p, m: None, lambda p: None)
    router[0].close()
