"""The work of a closed loop of requests, done in this process: nothing but the worker's runner and plans for it.

What is left out is what a server adds: HTTP, the tokenizer's process, the scheduler, messages between them.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.graphs import graph_buckets
from config.schema import Config
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner, Step
from ipc.codec import pack_ints
from ipc.engine_messages import NewRow, SamplingSpec, StepPlan
from tools.score.model import load


@dataclass(slots=True)
class _Running:
    """A request: of its `known` tokens, `computed` are in the KV pool."""

    row: int
    known: int
    length: int  # at which it ends
    computed: int = 0


class ClosedLoop:
    """`streams` requests at a time, the next one as soon as one ends; at most `longest` tokens each, all in all."""

    def __init__(self, model: LlamaModel, streams: int, longest: int, step_tokens: int, block_size: int) -> None:
        """`step_tokens`: most tokens of a step, prompts and decoding together; at least `streams`."""
        self._row_blocks = -(-longest // block_size)
        num_blocks = streams * self._row_blocks
        kv = model.allocate_kv(num_blocks, block_size)
        self._runner = Runner(model, kv, num_blocks, block_size, streams, longest, LocalComm())
        if self._runner.overlaps:
            self._runner.capture(graph_buckets(streams), lambda done: None)  # as a server does at its start
        self._streams = streams
        self._step_tokens = step_tokens
        self._running: Step | None = None  # on a device that the runner doesn't wait for
        self._steps = itertools.count()
        self._freed: list[int] = []

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """Seconds from the first step to the last, greedily and without an end of sequence."""
        waiting = deque(prompts)
        running: list[_Running] = []
        rows = list(range(self._streams))
        begin = time.perf_counter()
        while waiting or running:
            budget = self._step_tokens
            scheduled: list[tuple[int, int, int, int]] = []
            for request in running:  # those that decode stand before those whose prompt is being computed
                budget -= self._schedule(request, budget, scheduled)
            new: list[NewRow] = []
            while waiting and rows and budget:
                prompt, row = waiting.popleft(), rows.pop(0)
                blocks = range(row * self._row_blocks, (row + 1) * self._row_blocks)
                new.append(NewRow(row, pack_ints(prompt), len(prompt), pack_ints(blocks), SamplingSpec()))
                running.append(_Running(row, len(prompt), len(prompt) + output_tokens))
                budget -= self._schedule(running[-1], budget, scheduled)
            self._execute(scheduled, new)
            for request in [request for request in running if request.known == request.length]:
                running.remove(request)
                rows.append(request.row)
                self._freed.append(request.row)
        self._finish()
        return time.perf_counter() - begin

    def _schedule(self, request: _Running, budget: int, scheduled: list[tuple[int, int, int, int]]) -> int:
        """Add as many of the request's tokens as the step takes: row, first position, count, sample. How many."""
        count = min(request.known - request.computed, budget)
        if count:
            samples = request.computed + count == request.known
            scheduled.append((request.row, request.computed, count, int(samples)))
            request.computed += count
            request.known += samples
        return count

    def _execute(self, scheduled: list[tuple[int, int, int, int]], new: list[NewRow]) -> None:
        columns = pack_ints(value for entry in scheduled for value in entry)
        step = self._runner.launch(StepPlan(next(self._steps), tuple(new), pack_ints(self._freed), b"", columns))
        self._finish()
        self._runner.sample(step)
        self._running = step
        if not self._runner.overlaps:
            self._finish()
        self._freed = []

    def _finish(self) -> None:
        if self._running is not None:
            self._runner.collect(self._running)
            self._running = None


def load_as_served(path: Path, config: Config) -> LlamaModel:
    """The model with the settings of a resolved `config`; raises as `tools.score.model.load`."""
    model, worker = config.model, config.worker
    return load(path, model.dtype, worker.threads, worker.kernels, model.quantization, model.kv_dtype)


def measure(
    model: LlamaModel, config: Config, streams: int, prompts: Sequence[Sequence[int]], output_tokens: int
) -> float:
    """Output tokens a second of a closed loop with the step and block sizes of a resolved `config`."""
    longest = max(map(len, prompts)) + output_tokens
    step_tokens = max(streams, config.scheduler.max_step_tokens or 0)
    loop = ClosedLoop(model, streams, longest, step_tokens, config.scheduler.block_size)
    loop.run(prompts[:1], output_tokens)  # in which buffers grow
    return len(prompts) * output_tokens / loop.run(prompts, output_tokens)
