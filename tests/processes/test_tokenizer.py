"""The tokenizer process on real sockets, between a scripted scheduler and real clients."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.schema import (
    ChildSpec,
    Config,
    Endpoints,
    ModelArch,
    ModelConfig,
    SdkConfig,
    SupervisorConfig,
    TokenizerConfig,
)
from ipc.channels import AsyncRouter
from ipc.codec import Decoder, pack_int64s, pack_ints, unpack_ints
from ipc.control import Drain, Fail, Idle, Order, Ready, Status
from ipc.engine_client import EngineClient, Stream
from ipc.engine_messages import (
    AbortRequests,
    RowOutput,
    SchedulerReady,
    StepOutputs,
    StopRequest,
    Submit,
    TokenizerHello,
    TokenizerReport,
    ToScheduler,
)
from ipc.errors import RequestFailed
from ipc.messages import (
    ChatMessage,
    ChatPrompt,
    Delta,
    Failed,
    Finished,
    Generate,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from ipc.sessions import new_incarnation
from ipc.stats_messages import TokenizerWork
from tests.unit.tokenizer_proc.vocabularies import CHATML, byte_level_vocabulary

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = byte_level_vocabulary()
EOS = VOCABULARY.tokenizer.token_to_id("<|end|>")
NO_SDK = SdkConfig()
PATIENCE = 20.0  # seconds; only reached when something is broken
HANGING = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}" + CHATML
)

# Stands in for launch.child: reads the spec, and wires up the two control pipes.
CHILD = """
import sys, msgspec
from config.schema import ChildSpec
from ipc.control import Control
from tokenizer_proc.main import main
spec = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=ChildSpec)
sys.exit(main(spec, Control(int(sys.argv[2]), int(sys.argv[3]))))
"""


class Scheduler:
    """Repeats each prompt's tokens as its output, one a step, then ends the request.

    Prompts that contain "refuse" get a 429; those that contain "loop" end as a loop with the last token.
    """

    def __init__(self, endpoint: str) -> None:
        decoder: Decoder[ToScheduler] = Decoder(ToScheduler)
        self.heard: list[ToScheduler] = []
        self.holding = False  # True: accept requests and say nothing
        self.router = AsyncRouter(endpoint, decoder, new_incarnation(), self._on_message, lambda peer: None)
        self.router.start()

    def _on_message(self, peer: bytes, message: ToScheduler) -> None:
        self.heard.append(message)
        if isinstance(message, TokenizerHello):
            assert peer == b"tok0"
            self.router.send(peer, SchedulerReady(64, 16))
        elif isinstance(message, Submit) and not self.holding:
            text = VOCABULARY.tokenizer.decode(list(unpack_ints(message.token_ids)))
            if "refuse" in text:
                refusal = Failed(message.request_id, 429, "no", "rate_limit_error", code="ttft_target", retry_after=1.5)
                self.router.send(peer, StepOutputs((refusal,)))
                return
            for token in list(unpack_ints(message.token_ids))[: message.max_tokens]:
                self.say(message.request_id, token)
            if "loop" in text:
                last = RowOutput(message.request_id, pack_ints([EOS]), "stop", loop=True)
            else:
                last = RowOutput(message.request_id, pack_ints([EOS]), "stop", EOS, cached_tokens=1)
            self.router.send(peer, StepOutputs((last,)))

    def say(self, request_id: int, token: int) -> None:
        """One token with nothing else to say."""
        self.router.send(b"tok0", StepOutputs((), pack_int64s([request_id]), pack_ints([token])))

    async def work_after(self, prompts: int) -> TokenizerWork:
        """What the process reports once it has encoded so many."""
        while True:
            for message in self.of(TokenizerReport):
                assert isinstance(message, TokenizerReport)
                if message.work.prompts >= prompts:
                    return message.work
            await asyncio.sleep(0.02)

    def of(self, kind: type) -> list[ToScheduler]:
        return [message for message in self.heard if isinstance(message, kind)]


class Process:
    """A running tokenizer process and everything around it."""

    def __init__(
        self, directory: Path, template: str = CHATML, sdk: SdkConfig = NO_SDK, *, measure: bool = True
    ) -> None:
        model = directory / "model"
        model.mkdir()
        VOCABULARY.tokenizer.save(str(model / "tokenizer.json"))
        (model / "chat_template.jinja").write_text(template)
        self.endpoints = Endpoints(
            clients=(f"ipc://{directory}/clients-0",),
            scheduler=f"ipc://{directory}/scheduler",
            workers=f"ipc://{directory}/workers",
            stats=f"ipc://{directory}/stats",
        )
        spec = ChildSpec(
            role="tokenizer",
            index=0,
            config=Config(
                model=ModelConfig(max_model_len=4096, pooling="last"),
                tokenizer=TokenizerConfig(template_timeout=1.0),
                sdk=sdk,
                supervisor=SupervisorConfig(measure=measure),
            ),
            arch=ModelArch(
                family="llama",
                hidden_size=8,
                num_layers=1,
                num_heads=1,
                num_kv_heads=1,
                head_dim=8,
                intermediate_size=8,
                vocab_size=VOCABULARY.size,
                max_position=4096,
                eos_token_ids=(EOS,),
            ),
            model_path=str(model),
            served_names=("tiny",),
            endpoints=self.endpoints,
            run_dir=str(directory),
            incarnation=new_incarnation(),
            kv_memory_bytes=0,
            num_blocks=256,
        )
        path = directory / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        order_read, self._orders = os.pipe()
        self._status, status_write = os.pipe()
        os.set_blocking(self._status, False)
        self._status_text = b""
        self.popen = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(order_read), str(status_write)],
            cwd=ROOT,
            pass_fds=(order_read, status_write),
        )
        os.close(order_read)
        os.close(status_write)

    def order(self, order: Order) -> None:
        os.write(self._orders, msgspec.json.encode(order) + b"\n")

    def statuses(self) -> list[Status]:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._status, 65536):
                self._status_text += data
        return [msgspec.json.decode(line, type=Status) for line in self._status_text.splitlines()]

    def drop_launcher(self) -> None:
        """What the child sees when the launcher is killed."""
        os.close(self._orders)
        self._orders = -1

    async def exit_status(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.popen.wait), PATIENCE)

    def template_children(self) -> list[int]:
        pid = self.popen.pid
        with contextlib.suppress(FileNotFoundError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        os.close(self._status)
        if self._orders >= 0:
            os.close(self._orders)


class Setting:
    """Scheduler, tokenizer process and one client, connected."""

    def __init__(self, process: Process, scheduler: Scheduler, client: EngineClient) -> None:
        self.process, self.scheduler, self.client = process, scheduler, client

    async def complete(
        self, prompt: TextPrompt | TokenPrompt | ChatPrompt, client: EngineClient | None = None, **params: Any
    ) -> tuple[str, list[Finished]]:
        text, ends = "", []
        async for items in (client or self.client).generate(prompt, SamplingParams(**params)):
            for item in items:
                if isinstance(item, Delta):
                    text += item.text
                else:
                    ends.append(item)
        return text, ends


async def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    directory: Path, template: str = CHATML, sdk: SdkConfig = NO_SDK, *, measure: bool = True
) -> AsyncIterator[Setting]:
    process = Process(directory, template, sdk, measure=measure)
    client = EngineClient(process.endpoints.clients)
    setting = Setting(process, Scheduler(process.endpoints.scheduler), client)
    try:
        model = await client.connect(PATIENCE)
        assert (model.names, model.max_model_len, model.has_chat_template) == (("tiny",), 4096, True)
        assert (model.max_queue_requests, model.max_queue_tokens) == (2048, 4 << 20)
        assert model.vocab_size == VOCABULARY.size
        yield setting
    finally:
        await client.close()
        setting.scheduler.router.close()
        process.close()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Socket paths have at most 107 bytes, so the directory's name is kept short.
    return tmp_path_factory.mktemp("t")


def test_text_tokens_and_chat_in_and_text_out(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            text, (end,) = await setting.complete(TextPrompt("hello 🌶 é"))
            assert text == "hello 🌶 é"
            assert (end.reason, end.stop_reason, end.cached_tokens) == ("stop", None, 1)
            assert end.completion_tokens == end.prompt_tokens + 1

            ids = VOCABULARY.encode("Hi 漢", add_special_tokens=False)
            text, (end,) = await setting.complete(TokenPrompt(pack_ints(ids)))
            assert (text, end.prompt_tokens) == ("Hi 漢", len(ids))

            chat = ChatPrompt((ChatMessage("user", "Hi"),))
            text, _ = await setting.complete(chat, skip_special_tokens=False)
            assert text == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"

            long = "hello, " * 500
            text, (end,) = await setting.complete(TextPrompt(long))
            # Of token ids nothing is encoded; the template's text is.
            work = await setting.scheduler.work_after(3)
            assert (work.prompts, work.renders, work.grammars, work.encoding) == (3, 1, 0, 0)
            assert min(work.encode_seconds, work.encode_wait_seconds, work.render_seconds) > 0
            assert work.detokenize_seconds > 0
            assert text == long

    asyncio.run(run())


def test_many_requests_at_once_stay_apart(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            other = EngineClient(setting.process.endpoints.clients)
            await other.connect(PATIENCE)
            prompts = [f"{i} " + "🌶漢é hello" * (i % 7) for i in range(100)]
            answers = await asyncio.gather(
                *(
                    setting.complete(TextPrompt(prompt), other if i % 2 else None, n=1 + i % 2)
                    for i, prompt in enumerate(prompts)
                )
            )
            for i, (prompt, (text, ends)) in enumerate(zip(prompts, answers, strict=True)):
                assert len(ends) == 1 + i % 2
                if i % 2 == 0:
                    assert text == prompt
                else:
                    assert sorted(text) == sorted(prompt * 2)
            await other.close()

    asyncio.run(run())


def test_stop_strings_reach_the_scheduler(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            text, (end,) = await setting.complete(TextPrompt("ABC DEF GHI"), stop=("F G",))
            assert (text, end.reason, end.stop_reason) == ("ABC DE", "stop", "F G")
            await eventually(lambda: setting.scheduler.of(StopRequest), "the scheduler hearing of the stop")
            (stop,) = setting.scheduler.of(StopRequest)
            (submit,) = setting.scheduler.of(Submit)
            assert stop == StopRequest(submit.request_id)

    asyncio.run(run())


def test_what_the_scheduler_decides_by_comes_from_the_sdk(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            options: dict[str, Any] = {
                "priority": -5,
                "ttft_target_ms": 120,
                "cache_pin_seconds": 30,
                "namespace": "ns",
                "tenant": "team",
                "external_id": "trace",
            }
            stream = setting.client.generate(TextPrompt("hello"), SamplingParams(n=3, stop_on_loop=4), **options)
            async for _ in stream:
                pass
            submits = setting.scheduler.of(Submit)
            assert len(submits) == 3
            for submit in submits:
                assert {name: getattr(submit, name) for name in options} == options
                assert isinstance(submit, Submit)
                assert submit.stop_on_loop == 4

    asyncio.run(run())


OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"priority": 1_000_001}, "between -1000000 and 1000000"),
    ({"priority": -1_000_001}, "between -1000000 and 1000000"),
    ({"ttft_target_ms": 0.5}, "between 1 and 3600000"),
    ({"ttft_target_ms": float("nan")}, "between 1 and 3600000"),
    ({"cache_pin_seconds": 3600.1}, "between 0 and 3600"),
    ({"namespace": "n" * 129}, "at most 128 characters"),
    ({"tenant": "n" * 129}, "at most 128 characters"),
]


def test_a_client_that_does_not_check_is_refused_by_name_and_limit(directory: Path) -> None:
    # `EngineClient` would refuse these itself, so the messages are put on its link directly.
    async def run() -> None:
        async with running(directory) as setting:
            for at, (options, limit) in enumerate(OUT_OF_BOUNDS):
                request = Generate(1000 + at, TextPrompt("hello"), SamplingParams(), **options)
                failed = await answer_to(setting.client, request)
                assert (failed.status, [failed.param]) == (400, list(options))
                assert limit in failed.message
            assert (await setting.complete(TextPrompt("hello")))[0] == "hello"
            assert len(setting.scheduler.of(Submit)) == 1

    asyncio.run(run())


async def answer_to(client: EngineClient, *messages: Generate) -> Failed:
    """The first failure among the answers to messages that bypass the client's own checks and numbers."""
    (link,) = client._links
    stream = Stream(messages[0].request_id, 1, lambda stream: None)
    link.streams[messages[0].request_id] = stream
    for message in messages:
        assert link.dealer.send(message)
    with pytest.raises(RequestFailed) as caught:
        async for _ in stream:
            pass
    return caught.value.failed


def test_b070_one_id_twice_at_once_refuses_the_second_and_harms_nobody(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            setting.scheduler.holding = True
            twice = Generate(5, TextPrompt("hello"), SamplingParams(n=2))
            failed = await answer_to(setting.client, twice, twice)
            assert (failed.status, failed.param) == (400, "request_id")
            await eventually(lambda: len(setting.scheduler.of(Submit)) == 2, "the first one's choices")
            setting.scheduler.holding = False
            chat = ChatPrompt((ChatMessage("user", "Hi"),))
            assert (await setting.complete(TextPrompt("hello")))[0] == "hello"
            assert (await setting.complete(chat))[1]
            assert len(setting.scheduler.of(Submit)) == 4, "the duplicate was not submitted"
            assert setting.process.popen.poll() is None

    asyncio.run(run())


def test_a_refusal_reaches_the_client_whole(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            with pytest.raises(RequestFailed) as caught:
                await setting.complete(TextPrompt("refuse this"))
            failed = caught.value.failed
            assert (failed.status, failed.type, failed.code) == (429, "rate_limit_error", "ttft_target")
            assert failed.retry_after == 1.5

    asyncio.run(run())


def test_a_loop_ends_with_its_reason_and_whole_text(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            text, (end,) = await setting.complete(TextPrompt("loop loop loop"), stop=("pXYZ",))
            assert (text, end.reason, end.stop_reason) == ("loop loop loop", "stop", "repetition_loop")

    asyncio.run(run())


def test_bad_requests_get_a_400_and_the_next_is_served(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            for prompt, params, param in (
                (TextPrompt("a" * 5000), {}, "prompt"),
                (TextPrompt("hello"), {"max_tokens": 4095, "n": 2}, None),
                (TextPrompt("hello"), {"max_tokens": 4096}, "max_tokens"),
                (TokenPrompt(pack_ints([VOCABULARY.size])), {}, "prompt"),
            ):
                if param is None:
                    _, ends = await setting.complete(prompt, **params)  # just fits
                    assert len(ends) == 2
                    continue
                with pytest.raises(RequestFailed) as caught:
                    await setting.complete(prompt, **params)
                assert (caught.value.failed.status, caught.value.failed.param) == (400, param)
            assert (await setting.complete(TextPrompt("hello")))[0] == "hello"

    asyncio.run(run())


def test_a_hanging_template_fails_its_request_and_a_killed_child_none(directory: Path) -> None:
    async def run() -> None:
        async with running(directory, HANGING) as setting:
            hanging = setting.complete(ChatPrompt((ChatMessage("user", "loop"),)))
            text = setting.complete(TextPrompt("hello"))
            chat = setting.complete(ChatPrompt((ChatMessage("user", "Hi"),)))
            failed, plain, rendered = await asyncio.gather(hanging, text, chat, return_exceptions=True)
            assert isinstance(failed, RequestFailed)
            assert (failed.failed.status, failed.failed.param) == (400, "messages")
            assert "longer than 1 s" in failed.failed.message
            assert isinstance(plain, tuple)
            assert isinstance(rendered, tuple)

            (child,) = setting.process.template_children()
            os.kill(child, signal.SIGKILL)
            text_after, _ = await setting.complete(ChatPrompt((ChatMessage("user", "Hi"),)))
            assert text_after == rendered[0]

    asyncio.run(run())


def test_a_lost_client_is_aborted(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            setting.scheduler.holding = True
            other = EngineClient(setting.process.endpoints.clients)
            await other.connect(PATIENCE)
            other.generate(TextPrompt("hello"), SamplingParams(n=2))
            await eventually(lambda: len(setting.scheduler.of(Submit)) == 2, "both choices arriving")
            for link in other._links:
                link.dealer.close()  # as a killed client would: without a word
            await eventually(lambda: setting.scheduler.of(AbortRequests), "the abort")
            (abort,) = setting.scheduler.of(AbortRequests)
            assert isinstance(abort, AbortRequests)
            submitted = [message.request_id for message in setting.scheduler.of(Submit) if isinstance(message, Submit)]
            assert sorted(abort.request_ids) == sorted(submitted)

    asyncio.run(run())


def test_b074_output_for_an_unknown_request_is_aborted_and_harms_nobody(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            for _ in range(3):
                setting.scheduler.router.send(b"tok0", StepOutputs((RowOutput(123456, pack_ints([1])),)))
                setting.scheduler.say(654321, 1)
            assert (await setting.complete(TextPrompt("hello")))[0] == "hello"
            assert setting.scheduler.of(AbortRequests) == [AbortRequests((123456,)), AbortRequests((654321,))]

    asyncio.run(run())


def test_b074_requests_dropped_in_mid_stream_are_aborted_and_harm_nobody(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            setting.scheduler.holding = True
            rng = random.Random(74)
            streams = [setting.client.generate(TextPrompt("hello"), SamplingParams()) for _ in range(60)]
            await eventually(lambda: len(setting.scheduler.of(Submit)) == 60, "all requests arriving")
            ids = [submit.request_id for submit in setting.scheduler.of(Submit) if isinstance(submit, Submit)]
            (token,) = VOCABULARY.encode("hello", add_special_tokens=False)
            dropped = rng.sample(range(60), 18)
            for at in dropped:
                for request_id in ids:  # the scheduler does not know yet who has left
                    setting.scheduler.say(request_id, token)
                streams[at].abort()
                await asyncio.sleep(0)
            last = [RowOutput(ids[at], b"", "length") for at in range(60) if at not in dropped]
            setting.scheduler.router.send(b"tok0", StepOutputs(tuple(last)))
            for at, stream in enumerate(streams):
                items = [item async for batch in stream for item in batch]
                if at not in dropped:
                    assert "".join(item.text for item in items if isinstance(item, Delta)) == "hello" * len(dropped)
                    assert isinstance(items[-1], Finished)

            def aborted() -> set[int]:
                aborts = [message for message in setting.scheduler.heard if isinstance(message, AbortRequests)]
                return {request_id for message in aborts for request_id in message.request_ids}

            await eventually(lambda: aborted() == {ids[at] for at in dropped}, "the aborts")
            setting.scheduler.holding = False
            assert (await setting.complete(TextPrompt("hello")))[0] == "hello"

    asyncio.run(run())


def test_a_lost_scheduler_fails_requests_and_a_new_one_serves_again(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            setting.scheduler.holding = True
            waiting = asyncio.create_task(setting.complete(TextPrompt("hello")))
            await eventually(lambda: setting.scheduler.of(Submit), "the request arriving")
            setting.scheduler.router.close()
            with pytest.raises(RequestFailed) as caught:
                await asyncio.wait_for(waiting, PATIENCE)
            assert caught.value.failed.status == 503
            with pytest.raises(RequestFailed) as caught:
                await setting.complete(TextPrompt("hello"))
            assert caught.value.failed.status == 503
            setting.scheduler = Scheduler(setting.process.endpoints.scheduler)
            await eventually(lambda: setting.scheduler.of(TokenizerHello), "the new hello")

            async def served() -> bool:
                try:
                    return (await setting.complete(TextPrompt("hello")))[0] == "hello"
                except RequestFailed:
                    return False

            deadline = time.monotonic() + PATIENCE
            while not await served():
                assert time.monotonic() < deadline, "the new scheduler did not serve"
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_fail_order_ends_every_request_and_the_process(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            await eventually(
                lambda: any(isinstance(status, Ready) for status in setting.process.statuses()),
                "the report of readiness",
            )
            setting.scheduler.holding = True
            waiting = asyncio.create_task(setting.complete(TextPrompt("hello")))
            await eventually(lambda: setting.scheduler.of(Submit), "the request arriving")
            setting.process.order(Fail("rank 0 is gone"))
            with pytest.raises(RequestFailed, match="rank 0 is gone"):
                await asyncio.wait_for(waiting, PATIENCE)
            assert await setting.process.exit_status() == 0

    asyncio.run(run())


def test_drain_order_finishes_what_runs(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            setting.scheduler.holding = True
            waiting = asyncio.create_task(setting.complete(TextPrompt("hello")))
            await eventually(lambda: setting.scheduler.of(Submit), "the request arriving")
            setting.process.order(Drain())
            with pytest.raises(RequestFailed, match="shutting down"):
                while True:  # the order takes its own way, so a few requests may be taken before it
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(setting.complete(TextPrompt("hello")), 0.05)
            last = [
                RowOutput(submit.request_id, submit.token_ids, "length")
                for submit in setting.scheduler.of(Submit)
                if isinstance(submit, Submit)
            ]
            setting.scheduler.router.send(b"tok0", StepOutputs(tuple(last)))
            assert (await asyncio.wait_for(waiting, PATIENCE))[0] == "hello"
            assert await setting.process.exit_status() == 0
            assert any(isinstance(status, Idle) for status in setting.process.statuses())

    asyncio.run(run())


def test_no_process_outlives_the_launcher(directory: Path) -> None:
    async def run() -> None:
        async with running(directory) as setting:
            (child,) = setting.process.template_children()
            setting.process.drop_launcher()
            assert await setting.process.exit_status() == 70

            def gone() -> bool:
                try:
                    return Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                except FileNotFoundError:
                    return True

            await eventually(gone, "the end of the template's process")

    asyncio.run(run())


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = (
        "import sys, tokenizer_proc.main; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
