"""From the command line to runs: what is sent, to whom, and the runs of one invocation."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np

from tools.loadgen.answer import Answer, within
from tools.loadgen.clients import make_client
from tools.loadgen.lag import Limits
from tools.loadgen.messages import Item, Target
from tools.loadgen.options import DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_REQUESTS
from tools.loadgen.prompts import Prompts
from tools.loadgen.runner import Run, Runner
from tools.loadgen.schedule import Phases, Schedule, closed_loop, open_loop
from tools.loadgen.servers import Served, adapted, as_kind, look
from tools.loadgen.sources import Request, blocks_of_outputs, read_source, synthetic, with_arrivals
from tools.loadgen.summary import Summary, summarize
from tools.loadgen.synthetic import TRACE_ARRIVALS, Arrivals, parse_lengths
from tools.loadgen.words import single_token_words
from tools.traces import scaled_rate

_DEFAULT_ARRIVALS = Arrivals("poisson", rate=2.0)
_MOST_REQUESTS = 1_000_000  # without a trace
_MOST_SEEDS = 1 << 62


class UsageError(Exception):
    """Options that do not go together; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be sent. `requests` are in order of arrival, at the rate that was asked for."""

    requests: list[Request]
    arrivals: Arrivals

    @property
    def has_lengths(self) -> bool:
        """Some prompts are made by us."""
        return any(request.input_length for request in self.requests)


def read_load(arguments: argparse.Namespace) -> Load:
    """Raises `UsageError`, `TraceError` and `OSError`."""
    rng = np.random.default_rng(arguments.seed)
    if arguments.trace is None:
        for flag, given in (("--limit", arguments.limit is not None), ("--length-scale", arguments.length_scale != 1)):
            if given:
                raise UsageError(f"{flag}: only with --trace")
    load = _made_up(arguments, rng) if arguments.trace is None else _from_trace(arguments, rng)
    if load.arrivals.users:
        if arguments.rate_scale != 1:
            raise UsageError("--rate-scale: not with closed users, who wait for their answers")
        return load
    requests = scaled_rate(load.requests, arguments.rate_scale)
    if arguments.duration is not None:
        requests = [request for request in requests if request.time <= arguments.duration]
    return Load(requests, load.arrivals)


def _from_trace(arguments: argparse.Namespace, rng: np.random.Generator) -> Load:
    if arguments.requests is not None:
        raise UsageError("--requests: not with --trace, whose requests --limit counts")
    for flag, lengths in (("--input-tokens", arguments.input_tokens), ("--output-tokens", arguments.output_tokens)):
        if lengths is not None:
            raise UsageError(f"{flag}: not with --trace, which has lengths of its own")
    requests, has_times = read_source(arguments.trace, limit=arguments.limit, length_scale=arguments.length_scale)
    arrivals: Arrivals = arguments.arrivals or (TRACE_ARRIVALS if has_times else _DEFAULT_ARRIVALS)
    if arrivals.kind == "trace":
        if not has_times:
            raise UsageError(f"--arrivals trace: {arguments.trace} does not say when its requests came")
    elif not arrivals.users:
        requests = with_arrivals(requests, arrivals, rng)
    return Load(requests, arrivals)


def _made_up(arguments: argparse.Namespace, rng: np.random.Generator) -> Load:
    arrivals: Arrivals = arguments.arrivals or _DEFAULT_ARRIVALS
    if arrivals.kind == "trace":
        raise UsageError("--arrivals trace: there is no --trace")
    count = _how_many(arguments, arrivals)
    if count > _MOST_REQUESTS:
        raise UsageError(f"--requests, --duration: {count:,} requests are more than {_MOST_REQUESTS:,}")
    inputs = arguments.input_tokens or parse_lengths(DEFAULT_INPUT)
    outputs = arguments.output_tokens or parse_lengths(DEFAULT_OUTPUT)
    return Load(synthetic(count, arrivals, inputs, outputs, rng), arrivals)


def _how_many(arguments: argparse.Namespace, arrivals: Arrivals) -> int:
    if arguments.requests is not None:
        return int(arguments.requests)
    if arguments.duration is None:
        return DEFAULT_REQUESTS
    if arrivals.users:
        raise UsageError("--duration: with closed users also --requests is needed, as the most that they send")
    # More than will come: what is due later than --duration is left out.
    expected = arguments.duration * arrivals.rate * arguments.rate_scale
    return int(min(expected + 10 * arrivals.cv * expected**0.5 + 10, 2.0 * _MOST_REQUESTS))


def phases_of(arguments: argparse.Namespace) -> Phases:
    return Phases(arguments.ramp, arguments.warmup, arguments.cooldown)


def schedule_of(arguments: argparse.Namespace, load: Load) -> Schedule:
    """Raises `UsageError` when nothing would be measured."""
    if load.arrivals.users and arguments.cooldown and arguments.duration is None:
        raise UsageError("--cooldown: with closed users it needs --duration, which says when the end is")
    make = closed_loop if load.arrivals.users else open_loop
    schedule = make(load.requests, load.arrivals, phases_of(arguments), arguments.duration)
    if not schedule.measures_something:
        raise UsageError("--ramp, --warmup, --cooldown: nothing is left of the run to be measured")
    return schedule


def target_of(arguments: argparse.Namespace) -> Target:
    """As far as the command line says. Raises `UsageError` when keys are not given as they should be."""
    keys = {"--sdk-key": arguments.sdk_key, "--sdk-server-key": arguments.sdk_server_key}
    given = [flag for flag, value in keys.items() if value is not None]
    if arguments.sdk is not None and arguments.server not in ("auto", "tokenmill"):
        raise UsageError(f"--server {arguments.server}: over --sdk it is a tokenmill")
    if given and arguments.sdk is None:
        raise UsageError(f"{given[0]}: only with --sdk")
    if len(given) == 1:
        [other] = keys.keys() - given
        raise UsageError(f"{given[0]}: needs {other} as well: a client that proves itself has to know the server too")
    return Target(
        url=arguments.url.rstrip("/").removesuffix("/v1"),
        endpoints=tuple(arguments.sdk.split(",")) if arguments.sdk is not None else (),
        key_file=arguments.sdk_key or "",
        server_key=arguments.sdk_server_key or "",
        model=arguments.model,
        api=arguments.api,
        temperature=arguments.temperature,
        text_output=arguments.text_output,
        timeout=arguments.timeout,
    )


class Session:
    """The runs of one invocation against one server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._file: BinaryIO | None = None
        self.unwritten = ""  # why records are missing from their file, if some are
        self._target = target_of(arguments)
        self.words: list[str] = []  # of prompts that are text
        self.added_tokens = 0  # around a prompt that we make
        self._runs = 0
        self.run_id = f"lg{time.time_ns() // 1_000_000:x}"
        self.notes: list[str] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Runs within write to `--records`, where that was given. Raises `OSError` when it cannot be opened."""
        if self._arguments.records is None:
            yield
            return
        self._file = self._arguments.records.open("wb")
        try:
            yield
        finally:
            with suppress(OSError):  # each run has said what could not be written
                self._file.close()

    async def prepare(self, load: Load) -> None:
        """Look at the server, and at its tokenizer if texts are to be made. Raises `ServerError`, `WordsError`."""
        arguments = self._arguments
        if self._target.endpoints and any(request.body for request in load.requests):
            raise UsageError("--sdk: whole request bodies are HTTP's; use --url")
        served = as_kind(await look(self._target), arguments.server)
        self._target, cannot = adapted(self._target, served, timings=arguments.timings)
        self.notes += [self._what(load, served), *cannot, *_too_long(load, served), *_not_generated(load)]
        if self._target.api != "tokens" and load.has_lengths:
            self.words, added = await single_token_words(self._count)
            self.added_tokens = added
            self.notes.append(
                f"prompts are texts of {len(self.words)} words, one token each; the server adds {added} tokens of its "
                "template or its own to each"
            )

    async def run(self, schedule: Schedule) -> tuple[Run, Summary]:
        """Raises `RunError`. Each run's prompts have other tokens, unless there is only one with a given seed."""
        arguments = self._arguments
        seed = time.time_ns() if arguments.content_seed is None else arguments.content_seed + self._runs
        self._runs += 1
        run = await Runner(
            schedule,
            self._target,
            run_id=f"{self.run_id}-{self._runs}",
            processes=arguments.processes,
            content_seed=seed % _MOST_SEEDS,
            token_range=arguments.token_range,
            words=self.words,
            records_file=self._file,
        ).run()
        self.unwritten = self.unwritten or run.unwritten
        limits = Limits(arguments.max_send_lag_ms / 1e3, arguments.max_loop_lag_ms / 1e3, arguments.max_cpu)
        summary = summarize(
            run.records,
            workers=run.workers,
            limits=limits,
            slo=arguments.slo,
            added_tokens=self.added_tokens,
        )
        return run, summary

    def _what(self, load: Load, served: Served) -> str:
        arguments = self._arguments
        source = arguments.trace.name if arguments.trace else "synthetic"
        where = self._target.url if not self._target.endpoints else "the SDK"
        prompts = sum(request.input_length for request in load.requests)
        outputs = sum(request.output_length for request in load.requests)
        lengths = f", {prompts:,} prompt and {outputs:,} output tokens" if prompts else ""
        users = load.arrivals.users
        span = f"{users:,} users" if users else f"{load.requests[-1].time:,.1f} s from the first to the last"
        model = f"{self._target.model} on {where} ({served.kind})"
        return f"{source}: {len(load.requests):,} requests{lengths}, {span}; {model}"

    async def _count(self, text: str) -> int:
        """Tokens that the server counts for a prompt of this text."""
        target = msgspec.structs.replace(self._target, timings=False, chunk_tokens="")
        client = make_client(target, Prompts(0, self._arguments.token_range, ()))
        answer = Answer()
        await client.connect()
        prepared = client.prepare(Item(0, 0.0, output_length=1, text=text))
        try:
            await within(target.timeout, answer, lambda: client.send(prepared, self.run_id, answer))
        finally:
            await client.close()
        if answer.prompt_tokens is None:
            raise UsageError(f"--api {target.api}: the server does not count a prompt's tokens: {answer.outcome()[1]}")
        return answer.prompt_tokens


def _too_long(load: Load, served: Served) -> list[str]:
    if served.longest is None:
        return []
    longer = sum(request.input_length + request.output_length > served.longest for request in load.requests)
    text = f"{longer:,} requests are longer than the model's {served.longest:,} tokens: the server refuses them"
    return [text] if longer else []


def _not_generated(load: Load) -> list[str]:
    """Of a recording with turns that follow on each other."""
    total, shared, generated = blocks_of_outputs(load.requests)
    if not generated:
        return []
    return [
        f"{generated:,} of {total:,} full blocks of prompts ({generated / total:.1%}), of {shared:,} that the trace "
        "shares, were outputs of requests before: the server generates other tokens, and so its cache misses them"
    ]
