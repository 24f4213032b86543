"""What stands between the native kernels and the client: of a step's time, and of the tokens a second.

A closed loop of streams on a real server, whose event log holds the parts of each step's time; then the same prompts
and outputs in this process.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from config.resolve import Resolved
from ipc.control import StartError
from scheduler_proc.event_log import Entry, EventLog
from scheduler_proc.events import StepDone
from tokenizer_proc.vocabulary import load_vocabulary
from tools.drills.kv import resolved
from tools.drills.progress import Progress
from tools.drills.server import Reply, complete, http, server
from tools.reports.table import render

HELP = """\
Start a server for each number of streams and let so many clients send one request after the other, with prompts that no
cache has seen. Then do the same work in this process, with the runner alone.

The scheduler's event log says of each step how long the worker was between steps, and then took to prepare, compute
(forward) and sample. What is shown is of steps that decoded one token of each stream and nothing else, and followed
such a step: the worker then never waited for a request.

outside   1 - forward / (between + prepare + forward + sample): median of the steps, and of the sums over all steps.
          forward is the native call and a few microseconds of Python around it; greedy sampling is part of the call.
HTTP      output tokens of all requests / time from the first request to the end of the last, the prompts included. The
          server writes its event log meanwhile, and the clients take their part of this machine.
in process   the same for prompts and outputs of the same lengths, on the model loaded with the server's settings: steps
          of at most --max-step-tokens, prompts and decoding together, but no scheduler, tokenizer or HTTP.

Settings of the server come from TOKENMILL_* variables, such as TOKENMILL_QUANTIZATION=none for bfloat16 weights.
"""

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "for", "on", "as", "with", "this", "was", "at", "by")
_LEAST_REQUESTS = 8
_HEADER = [
    *("steps", "between us", "prepare", "forward", "sample", "step ms", "outside", "of sums"),
    *("HTTP tok/s", "in process", "ratio"),
]


class StepTimes(NamedTuple):
    """The parts of one step's time, in microseconds, one after the other."""

    between: int
    prepare: int
    forward: int
    sample: int

    @property
    def interval(self) -> int:
        return sum(self)

    @property
    def outside(self) -> float:
        return 1 - self.forward / max(1, self.interval)


async def run(options: Namespace) -> None:
    """Print one line for each of `options.streams`."""
    path, plan = resolved(options.model)
    prompts = {
        streams: [
            _prompt(f"{streams}-{index}", options.prompt_words)
            for index in range(max(streams * options.requests, _LEAST_REQUESTS))
        ]
        for streams in dict.fromkeys(options.streams)
    }
    served = {}
    for streams, texts in prompts.items():
        served[streams] = await _serve(options.model, streams, texts, options.output_tokens)
    in_process = _in_process_rates(path, plan, prompts, options.output_tokens)
    rows = [
        (f"{streams} stream{'s' if streams > 1 else ''}", row(*served[streams], in_process[streams]))
        for streams in prompts
    ]
    print(
        f"{options.prompt_words} prompt words, {options.output_tokens} output tokens; requests: "
        + ", ".join(f"{len(texts)} with {streams} streams" for streams, texts in prompts.items())
    )
    print(render(_HEADER, rows))


def _in_process_rates(
    path: Path, server_plan: Resolved, prompts: Mapping[int, Sequence[str]], output_tokens: int
) -> dict[int, float]:
    """Output tokens a second of the runner alone, for each number of streams."""
    # Here, since it brings torch, which takes seconds and which no other drill needs.
    from tools.drills.in_process import load_as_served, measure

    try:
        vocabulary = load_vocabulary(path)
        model = load_as_served(path, server_plan.config)
    except StartError as error:  # which names the flag or the file itself
        raise SystemExit(f"error: {error}") from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: --model {path}: {error}") from None
    rates = {}
    for streams, texts in prompts.items():
        print(f"  in process: {streams} streams", file=sys.stderr)
        ids = [vocabulary.encode(text, add_special_tokens=True) for text in texts]
        rates[streams] = measure(model, server_plan.config, streams, ids, output_tokens)
    return rates


def row(steps: Sequence[StepTimes], http_rate: float, in_process: float) -> list[str]:
    """The values below `_HEADER`; rates in tokens a second."""
    rates = [f"{http_rate:.1f}", f"{in_process:.1f}", f"{http_rate / in_process:.3f}"]
    if not steps:
        return ["0", *["-"] * 7, *rates]
    medians = [statistics.median(column) for column in zip(*steps, strict=True)]
    of_sums = 1 - sum(step.forward for step in steps) / max(1, sum(step.interval for step in steps))
    return [
        str(len(steps)),
        *(f"{value:.0f}" for value in medians),
        f"{statistics.median(step.interval for step in steps) / 1e3:.2f}",
        f"{statistics.median(step.outside for step in steps):.1%}",
        f"{of_sums:.1%}",
        *rates,
    ]


def decode_steps(entries: Iterable[Entry], rows: int) -> list[StepTimes]:
    """Of the steps that decoded one token of `rows` requests and did nothing else, right after such a step.

    The first one after a prompt, or after the engine had nothing to do, is left out: the plan of a step that follows at
    once was sent while the step before it ran, so what is between them is no waiting for a request.
    """
    found = []
    planned: dict[int, tuple[int, int]] = {}  # rows and tokens of the steps in flight
    previous = -1
    for entry in entries:
        if isinstance(entry.event, StepDone):
            result = entry.event.result
            if planned.pop(result.step, None) == (rows, rows) and len(result.token_ids) == 4 * rows:
                if result.step == previous + 1:
                    found.append(StepTimes(result.between_us, result.prepare_us, result.forward_us, result.sample_us))
                previous = result.step
        for plan in entry.plans:
            planned[plan.step] = (plan.rows, plan.tokens)
    return found


def _prompt(seed: str, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(words))


async def _serve(model: str, streams: int, texts: list[str], output_tokens: int) -> tuple[list[StepTimes], float]:
    """(times of the steps that decoded `streams` rows, output tokens a second over HTTP)."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-drill-") as folder:
        file = Path(folder) / "events"
        flags = ("--event-log", str(file), "--max-seqs", str(max(64, streams)))
        async with server(model, *flags) as url, http() as session:
            await _loop(session, url, [_prompt("warm-up", len(texts[0].split()))], output_tokens, 1)
            rate = await _loop(session, url, texts, output_tokens, streams)
        return decode_steps(EventLog(file), streams), rate


async def _loop(
    session: aiohttp.ClientSession, url: str, texts: Sequence[str], output_tokens: int, streams: int
) -> float:
    """Output tokens a second of `streams` clients, each of which sends the next of `texts` when its last one ended."""
    waiting = iter(texts)
    replies: list[Reply] = []
    begin = time.perf_counter()
    with Progress(f"{streams} streams", len(texts)) as progress:

        async def client() -> None:
            for text in waiting:
                replies.append(await complete(session, url, text, output_tokens))
                progress.step()

        await asyncio.gather(*[client() for _ in range(streams)])
    seconds = time.perf_counter() - begin
    failed = [reply for reply in replies if len(reply.token_ids) != output_tokens]
    if failed:
        raise SystemExit(f"a request failed: {failed[0].status} {failed[0].error or 'too few tokens'}")
    return len(replies) * output_tokens / seconds
