"""How long a server takes to its first answer, and what memory its processes take."""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

from config.bytesize import format_size
from config.memory_plan import MemoryPlan
from kernels.cpu.build import CACHE_VARIABLE
from tools.drills.kv import resolved
from tools.drills.memory import Memory, memory_of
from tools.drills.progress import Progress
from tools.drills.server import complete, http, metric, server
from tools.reports.table import render

HELP = """\
Start a server with an empty cache of compiled kernels, then again and again with the kernels it has compiled; each time
one request of a few words is sent at once. Times count from the start of `python -m launch`. Files of Python, libraries
and model may be in the system's page cache each time: after a boot, reading them comes on top.

Then memory, of a server whose KV pool (--kv-memory) is filled with prompts until cached blocks had to go, so that each
block of the pool has been written; of a pool with room left, only what has been written takes memory.

anonymous    heap, stacks, weights, KV, and pages of libraries that were written to
libraries    of files that are mapped: the interpreter, libraries, kernels. Pages that several processes share are
             divided among them, here and in all columns but private
weight files mapped pages of the checkpoint
private      what no other process shares: the memory that its end would free

The last line compares the worker's anonymous memory, less that of an idle process that has imported the same modules,
with the bytes of packed weights and KV pool (see `python -m launch --plan`). What is above 1 are activations, buffers,
stacks, and whatever is kept twice. Settings come from TOKENMILL_* variables.
"""

_PROMPT = "The first ship of the year came into the harbour"
_OUTPUT_TOKENS = 64
_FILL_TOKENS = 496  # of a prompt, at most
_FILL_OUTPUT = 8
_FILL_AT_ONCE = 4
_FILL_MOST = 3  # pools of prompts until a block must have been evicted
_WORKER = "gpu_workers.main"
_WORKER_MODULES = ("launch.child", _WORKER, "gpu_workers.worker", "gpu_workers.backends.native_cpu")
_IDLE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(flush=True)
sys.stdin.read()
"""


class Start(NamedTuple):
    """Seconds since the server's process was started."""

    ready: float
    first_token: float
    whole_answer: float


async def run(options: Namespace) -> None:
    """Print both tables and the worker's ratio."""
    flags = ("--kv-memory", options.kv_memory)
    _, plan = resolved(options.model, *flags)
    with tempfile.TemporaryDirectory(prefix="tokenmill-drill-") as cache:
        variables = {CACHE_VARIABLE: cache}
        cold = await _start(options.model, variables)
        compiled = any(name.endswith(".so") for name in os.listdir(cache))
        warm = [await _start(options.model, variables) for _ in range(options.repeats)]
        rows = [
            ("cold, kernels compiled" if compiled else "first, nothing to compile", cold),
            (f"warm, median of {options.repeats}", median(warm)),
        ]
        labels = ["ready", "first token", f"{_OUTPUT_TOKENS} tokens"]
        print(render(labels, [(name, [f"{value:.2f} s" for value in start]) for name, start in rows]), flush=True)
        async with server(options.model, *flags, variables=variables) as url, http() as session:
            await _fill(session, url, plan.plan, plan.config.model.max_model_len or _FILL_TOKENS)
            processes = server_memory()
    async with _idle_process(plan.config.worker.threads) as pid:
        idle = memory_of(pid)
    table = [*processes, ("all", total([memory for _, memory in processes])), ("idle, modules of the worker", idle)]
    print(f"\nafter all {plan.plan.num_blocks} KV blocks were written; MiB")
    print(render(["PSS", "anonymous", "libraries", "weight files", "shared memory", "private"], memory_rows(table)))
    print(worker_line([memory for name, memory in processes if name == _WORKER], idle, plan.plan))


def median(starts: Sequence[Start]) -> Start:
    """Of each column."""
    return Start(*(statistics.median(column) for column in zip(*starts, strict=True)))


def total(memories: Sequence[Memory]) -> Memory:
    """Sums; since shared pages are divided among processes, none counts twice."""
    return Memory(*(sum(column) for column in zip(*memories, strict=True)))


def memory_rows(table: Sequence[tuple[str, Memory]]) -> list[tuple[str, list[str]]]:
    """Names and MiB, for the columns that `run` prints."""
    return [
        (
            name,
            [
                f"{value / (1 << 20):.1f}"
                for value in (
                    *(memory.total, memory.anonymous, memory.code, memory.weight_files, memory.shared_memory),
                    memory.private,
                )
            ],
        )
        for name, memory in table
    ]


def worker_line(workers: Sequence[Memory], idle: Memory, plan: MemoryPlan) -> str:
    """The worker with the most anonymous memory, beyond the idle process, over weights and KV pool."""
    beyond = max(worker.anonymous for worker in workers) - idle.anonymous
    planned = plan.weights + plan.kv
    return (
        f"worker beyond an idle process: {format_size(beyond)} anonymous; packed weights {format_size(plan.weights)} + "
        f"KV pool {format_size(plan.kv)} = {format_size(planned)}; ratio {beyond / planned:.3f}"
    )


async def _start(model: str, variables: Mapping[str, str]) -> Start:
    began = time.perf_counter()
    async with server(model, variables=variables) as url, http() as session:
        ready = time.perf_counter()
        reply = await complete(session, url, _PROMPT, _OUTPUT_TOKENS)
    if not reply.finished:
        raise SystemExit(f"the first request failed: {reply.status} {reply.error}")
    return Start(ready - began, reply.times[0] - began, reply.ended - began)


async def _fill(session: aiohttp.ClientSession, url: str, plan: MemoryPlan, max_model_len: int) -> None:
    """Prompts that no cache has seen, until there is no block that has never been used."""
    rng = random.Random(7)
    length = max(1, min(_FILL_TOKENS, max_model_len - _FILL_OUTPUT))
    least = plan.kv_tokens // (length * _FILL_AT_ONCE) + 1  # nothing is evicted while a block is free
    with Progress("filling the KV pool", least) as progress:
        for batch in range(1, _FILL_MOST * least + 1):
            prompts = [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(_FILL_AT_ONCE)]
            replies = await asyncio.gather(*[complete(session, url, prompt, _FILL_OUTPUT) for prompt in prompts])
            for reply in replies:
                if not reply.finished:
                    raise SystemExit(f"a request failed: {reply.status} {reply.error}")
            progress.step()
            if batch >= least:
                await asyncio.sleep(1.0)  # the next counters
                if await metric(session, url, "num_evicted_blocks_total"):
                    return
    raise SystemExit(f"the KV pool of {plan.num_blocks} blocks did not fill: is the prefix cache off?")


def server_memory() -> list[tuple[str, Memory]]:
    """Of the launcher and all it started, by their module, the largest first; of this process's children only."""
    found = []
    for process in psutil.Process().children(recursive=True):
        found.append((module_of(process.cmdline()), memory_of(process.pid)))
    return sorted(found, key=lambda item: -item[1].total)


def module_of(command: Sequence[str]) -> str:
    """The module that a process of the server runs: the last argument of `-m launch.child`, or what follows -m."""
    if "-m" not in command[:-1]:
        return Path(command[0]).name if command else "?"
    module = command[command.index("-m") + 1]
    return command[-1] if module == "launch.child" else module


@asynccontextmanager
async def _idle_process(threads: int | None) -> AsyncIterator[int]:
    """The PID of a process that has imported what a worker imports, and does nothing."""
    variables = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}  # as `launch.child` sets it
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IDLE, *_WORKER_MODULES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=variables,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise SystemExit("the worker's modules cannot be imported")
        yield process.pid
    finally:
        process.stdin.close()  # which ends it
        await process.wait()
