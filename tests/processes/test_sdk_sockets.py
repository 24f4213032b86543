"""The SDK and a real tokenizer process over each kind of socket that --sdk-listen makes."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from config.schema import SdkConfig
from config.tenants import namespace_of
from ipc import AsyncClient, AuthenticationFailed, BadRequest, Conflict, ConnectionLost, DeadlineExceeded
from ipc.engine_client import EngineClient
from ipc.engine_messages import AbortRequests, Submit, TokenizerReport
from ipc.key_files import key_line
from ipc.messages import ClientReport, TextPrompt
from launch.listen import free_loopback_port
from tests.key_files import make_key_file
from tests.processes.test_tokenizer import PATIENCE, Setting, eventually, running


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Socket paths have at most 107 bytes, so the directory's name is kept short.
    return tmp_path_factory.mktemp("s")


class Secured:
    """A server with keys, and the key files of its clients."""

    def __init__(self, directory: Path, *tenants: str) -> None:
        self.folder = directory
        self.server_key = make_key_file(directory / "server.key").public.decode()
        lines = [key_line(make_key_file(self.key(tenant)).public, tenant) for tenant in tenants]
        (directory / "clients.txt").write_text("\n".join(lines))
        self.address = f"tcp://127.0.0.1:{free_loopback_port()}"
        self.config = SdkConfig(
            sdk_listen=self.address,
            sdk_keys=str(directory / "clients.txt"),
            sdk_server_key=str(directory / "server.key"),
        )

    def key(self, tenant: str) -> Path:
        return self.folder / f"{tenant}.key"

    def client(self, tenant: str) -> AsyncClient:
        return AsyncClient(self.address, key=self.key(tenant), server_key=self.server_key)


def submits(setting: Setting) -> list[Submit]:
    return [message for message in setting.scheduler.heard if isinstance(message, Submit)]


def test_the_tenant_is_whose_key_it_is_whatever_the_message_says(directory: Path) -> None:
    secured = Secured(directory, "red", "blue")

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), running(directory, sdk=secured.config) as setting:
            async with secured.client("red") as red, secured.client("blue") as blue:
                for client in (red, blue):
                    answer = await client.generate("hello 🌶", tenant="blue", namespace="ns", idempotency_key="k")
                    assert answer.text == "hello 🌶"
                await red.generate("hello", tenant="blue")
            assert [submit.tenant for submit in submits(setting)] == ["red", "blue", "red"]
            assert [submit.namespace for submit in submits(setting)] == [
                namespace_of("red", "ns"),
                namespace_of("blue", "ns"),
                "red",
            ]
            make_key_file(secured.key("green"))
            with pytest.raises(AuthenticationFailed, match="does not know this client's key"):
                await secured.client("green").connect()
            trusted = await setting.complete(TextPrompt("hello"))
            assert trusted[0] == "hello"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_further_address_without_keys(directory: Path, kind: str) -> None:
    path = directory / "own.sock"
    address = f"ipc://{path}" if kind == "ipc" else f"tcp://127.0.0.1:{free_loopback_port()}"

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), running(directory, sdk=SdkConfig(sdk_listen=address)) as setting:
            async with AsyncClient(address) as client:
                assert (await client.generate("hello", tenant="me")).text == "hello"
                assert [chunk async for chunk in client.stream([{"role": "user", "content": "Hi"}])]
            if kind == "ipc":
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
            # Whoever can use the socket file is this user; over TCP nobody is anybody without a key.
            assert submits(setting)[0].tenant == ("me" if kind == "ipc" else "")

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_only_this_user_reports_on_its_processes(directory: Path, kind: str) -> None:
    """Anybody else could have the diagnosis name a wrong cause."""
    address = f"ipc://{directory / 'own.sock'}" if kind == "ipc" else f"tcp://127.0.0.1:{free_loopback_port()}"

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), running(directory, sdk=SdkConfig(sdk_listen=address)) as setting:

            def told() -> set[str]:
                reports = [message for message in setting.scheduler.heard if isinstance(message, TokenizerReport)]
                return {client.name for report in reports for client in report.clients}

            trusted, other = EngineClient(setting.process.endpoints.clients), EngineClient([address])
            for name, client in (("other", other), ("trusted", trusted)):
                await client.connect()
                client.report(ClientReport(name, 1.0, 1, 0.0))
                await client.tokenize(TextPrompt("hello"))  # behind it on the same connection
            await eventually(lambda: "trusted" in told(), "what the trusted client told")
            assert ("other" in told()) == (kind == "ipc")
            await trusted.close()
            await other.close()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def one_client(directory: Path) -> AsyncIterator[tuple[Setting, AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE))
        setting = await stack.enter_async_context(running(directory))
        yield setting, await stack.enter_async_context(AsyncClient(setting.process.endpoints.clients))


def test_a_deadline_reaches_the_scheduler_as_an_abort(directory: Path) -> None:
    async def main() -> None:
        async with one_client(directory) as (setting, client):
            setting.scheduler.holding = True
            with pytest.raises(DeadlineExceeded):
                await client.generate("hello", n=2, deadline=0.2)

            def aborted() -> set[int]:
                aborts = [message for message in setting.scheduler.heard if isinstance(message, AbortRequests)]
                return {request_id for message in aborts for request_id in message.request_ids}

            await eventually(lambda: len(aborted()) == 2, "the abort of both choices")

    asyncio.run(main())


def test_a_key_answers_a_repetition_and_refuses_another_request(directory: Path) -> None:
    async def main() -> None:
        async with one_client(directory) as (setting, client):
            first = await client.generate("hello 🌶", n=2, idempotency_key="k")
            async with AsyncClient(setting.process.endpoints.clients) as other:
                again = await other.generate("hello 🌶", n=2, idempotency_key="k")
            assert again == first
            assert len(submits(setting)) == 2
            with pytest.raises(BadRequest) as caught:
                await client.generate("hello", n=2, idempotency_key="k")
            assert caught.value.param == "idempotency_key"

            setting.scheduler.holding = True
            running_one = asyncio.create_task(client.generate("hello", idempotency_key="running"))
            await eventually(lambda: len(submits(setting)) == 3, "the request arriving")
            with pytest.raises(Conflict):
                await client.generate("hello", idempotency_key="running")
            running_one.cancel()

    asyncio.run(main())


def test_a_killed_tokenizer_process_is_a_typed_error(directory: Path) -> None:
    async def main() -> None:
        async with one_client(directory) as (setting, client):
            setting.scheduler.holding = True
            waiting = [asyncio.create_task(client.generate("hello", retries=0)) for _ in range(10)]
            await eventually(lambda: len(submits(setting)) == 10, "the requests arriving")
            setting.process.popen.kill()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(end) for end in ends] == [ConnectionLost] * 10

    asyncio.run(main())
