"""The tokenizer process: sockets around `tokenizer_proc.service`."""

import os

# Read by the tokenizers library when it is first used: its own thread pool would fight the model for the cores.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import msgspec
import uvloop

from config.grammar import token_table_path
from config.schema import ChildSpec
from ipc.channels import AsyncDealer
from ipc.codec import Decoder
from ipc.control import Control, Drain, Idle, Order, end_on_error
from ipc.engine_messages import FromScheduler, SchedulerReady, TokenizerHello, TokenizerReport
from ipc.messages import ModelInfo
from ipc.process_usage import UsageMeter, watch_loop
from ipc.stats_messages import TokenizerWork
from ipc.tracing import Tracer

from .clients import Clients
from .encoding import PromptEncoder
from .grammars import GrammarCompiler
from .ingress import Limits, sampling_defaults
from .output_format import reasoning_format, tool_format
from .service import Service
from .templates import TemplateError, TemplateRenderer
from .vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.2  # for the last messages to leave before the process does
_REPORT_SECONDS = 0.5


class Tokenizer:
    """The shell: connects the service to its peers, and ends when told to."""

    def __init__(self, spec: ChildSpec, control: Control, vocabulary: Vocabulary) -> None:
        max_model_len = spec.config.model.max_model_len
        assert max_model_len is not None  # resolved by the launcher
        assert spec.config.model.pooling != "auto"
        self._spec = spec
        self._control = control
        self._ready = False
        self._ended = asyncio.Event()
        self._meter = UsageMeter(f"tokenizer-{spec.index}")
        self._detokenize_seconds = 0.0
        self._renderer: TemplateRenderer | None = None
        if vocabulary.chat_template is not None:
            self._renderer = TemplateRenderer(
                vocabulary.chat_template, vocabulary.special_tokens, spec.config.tokenizer.template_timeout
            )
        self._encoder = PromptEncoder(vocabulary, self._renderer, max_model_len)
        self._grammars = GrammarCompiler(
            vocabulary,
            spec.arch.vocab_size,
            spec.arch.eos_token_ids,
            token_table_path(spec.run_dir),
            spec.config.tokenizer.grammar_timeout,
        )
        model = self._model = ModelInfo(
            spec.served_names,
            max_model_len,
            spec.arch.vocab_size,
            int(time.time()),
            self._renderer is not None,
            sampling_defaults(spec.generation, spec.arch.vocab_size),
            vocabulary.special_token_ids(),
            spec.config.server.chat_template_kwargs,
            max_queue_requests=spec.config.scheduler.max_queue_requests,
            max_queue_tokens=spec.config.scheduler.max_queue_tokens,
            pooling=spec.config.model.pooling,
        )
        from_scheduler: Decoder[FromScheduler] = Decoder(FromScheduler)
        identity = b"tok%d" % spec.index
        process = f"tokenizer-{spec.index}"
        self._tracer = Tracer(process, spec.endpoints.traces.get(process, ""))
        self._service = Service(
            vocabulary,
            self._encoder,
            Limits(
                model,
                spec.arch.eos_token_ids,
                spec.num_blocks * spec.config.scheduler.block_size,
                spec.config.scheduler.stop_on_loop,
                spec.generation.max_new_tokens,
            ),
            max_encoding=spec.config.scheduler.max_queue_requests,
            to_client=lambda peer, message: self._clients.send(peer, message),
            to_scheduler=lambda message: self._scheduler.send(message),
            on_idle=self._idle,
            grammars=self._grammars,
            idempotency_seconds=spec.config.sdk.idempotency_seconds,
            tracer=self._tracer,
        )
        self._clients = Clients(spec, self._service.from_client, self._service.client_lost)
        self._scheduler = AsyncDealer(
            spec.endpoints.scheduler,
            from_scheduler,
            identity,
            self._from_scheduler,
            self._scheduler_connected,
            self._scheduler_lost,
        )

    async def run(self) -> int:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()

        def on_order(order: Order) -> None:
            loop.call_soon_threadsafe(self._obey, order)

        self._control.listen(on_order, loop)
        if self._renderer is not None:
            self._control.stage("checking the chat template")
            try:
                await self._renderer.start()
                await self._renderer.check_generation_prompt()
                await self._find_formats(self._renderer)
            except TemplateError as error:
                log.warning("chat requests will fail: %s", error)
        self._control.stage("waiting for the scheduler")
        self._clients.start()
        self._scheduler.start()
        self._tracer.start()
        measures = self._spec.config.supervisor.measure
        watching = loop.create_task(watch_loop(self._meter.add_lag)) if measures else None
        while not self._ended.is_set():
            self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):
                    await self._ended.wait()
        if watching is not None:
            watching.cancel()
        await self._encoder.close()
        await self._grammars.close()
        await asyncio.sleep(_FLUSH_SECONDS)
        self._clients.close()
        self._scheduler.close()
        self._tracer.close()
        return 0

    def _report(self) -> None:
        """Tell the scheduler, which publishes it, what this process does."""
        encoder = self._encoder
        work = TokenizerWork(
            encoding=self._service.encoding,
            prompts=encoder.prompts,
            encode_seconds=encoder.encode_seconds,
            encode_wait_seconds=encoder.encode_wait_seconds,
            renders=encoder.renders,
            render_seconds=encoder.render_seconds,
            grammars=self._grammars.compiled,
            grammar_seconds=self._grammars.seconds,
            detokenize_seconds=self._detokenize_seconds,
            child_wait_seconds=encoder.render_wait_seconds + self._grammars.waited,
        )
        self._scheduler.send(TokenizerReport(self._meter.usage(), work, self._service.client_reports.newest))

    async def _find_formats(self, renderer: TemplateRenderer) -> None:
        """Tell clients how the model writes tool calls and reasoning."""
        settings = self._spec.config.server
        tools, tools_why = tool_format(
            settings.tool_parser, renderer.template, shows_tools=await renderer.check_tools()
        )
        reasoning, reasoning_why = reasoning_format(settings.reasoning_parser, renderer.template)
        if self._spec.index == 0:
            log.info("%s", tools_why)
            log.info("%s", reasoning_why)
        model = msgspec.structs.replace(self._model, tool_format=tools, reasoning_format=reasoning)
        self._service.describe(model)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Drain):
            self._service.drain()
        else:
            self._service.fail_all(order.reason)
            self._ended.set()

    def _idle(self) -> None:
        self._control.report(Idle())
        self._ended.set()

    def _scheduler_connected(self) -> None:
        self._scheduler.send(TokenizerHello(self._spec.index))

    def _scheduler_lost(self) -> None:
        log.error("the scheduler is gone")
        self._service.scheduler_lost()

    def _from_scheduler(self, message: FromScheduler) -> None:
        if not isinstance(message, SchedulerReady):
            begun = time.perf_counter()
            self._service.from_scheduler(message)
            self._detokenize_seconds += time.perf_counter() - begun
            return
        self._service.scheduler_ready()
        if not self._ready:
            self._ready = True
            self._control.ready()


def main(spec: ChildSpec, control: Control) -> int:
    """Entry point of the process; `launch.child` calls it."""
    control.stage("loading the vocabulary")
    vocabulary = load_vocabulary(Path(spec.model_path))

    async def run() -> int:
        asyncio.get_running_loop().set_exception_handler(end_on_error)
        return await Tokenizer(spec, control, vocabulary).run()

    return uvloop.run(run())
