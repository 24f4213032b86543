"""CUDA graphs of decode steps: one launch instead of hundreds, which the device would have to wait for.

A graph is captured at start for each bucket of batch sizes and context lengths. It reads its batch where
`StepInputs` puts it and writes logits that stay where they are; both places, and the memory between them, all graphs
share, since only one runs at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from config.graphs import graph_contexts
from gpu_workers.backend import Compiled
from gpu_workers.backends.triton_inputs import Bucket, GpuBatch, StepInputs
from gpu_workers.backends.triton_kv import GpuKV
from gpu_workers.batch import ForwardBatch


def buckets_of(sequences: Sequence[int], max_model_len: int) -> list[Bucket]:
    """Of each number of sequences one for each of some longest contexts, smallest first.

    The grid of a graph's attention is that of its longest context, and programs beyond a sequence's end cost time.
    """
    contexts = graph_contexts(max_model_len)
    return [Bucket(count, context) for count in sorted(sequences) for context in contexts]


class HostGraph:
    """What stands for a CUDA graph without a GPU: does the work again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class CudaGraph:
    """`work`, recorded on the device; its memory comes from `pool`."""

    def __init__(self, work: Callable[[], None], pool: Any, stream: Any) -> None:
        """Captured on `stream`, the same for all graphs: libraries keep a workspace for each stream that they see."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # libraries and Triton do now what they do only once
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            work()

    def replay(self) -> None:
        self._graph.replay()


@dataclass(slots=True, frozen=True)
class _Captured:
    graph: HostGraph | CudaGraph
    logits: torch.Tensor  # where it puts them, as is the next one
    body: tuple[torch.Tensor, ...]


class GraphCompiled(Compiled):
    """A forward whose decode batches are replayed where there is a graph for them, and that is run op by op else."""

    def __init__(
        self,
        body: Callable[[Any, Any], tuple[torch.Tensor, ...]],
        select: Callable[[Any, Any], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """See `Backend.compile`."""
        super().__init__(body, select, head)
        self._graphs: dict[Bucket, _Captured] = {}

    def __call__(self, batch: GpuBatch | ForwardBatch, kv: GpuKV) -> torch.Tensor:
        if isinstance(batch, ForwardBatch):
            batch = GpuBatch.of(batch, kv.pool.device)
        captured = self._graphs.get(batch.bucket) if batch.bucket is not None else None
        if captured is None:
            batch = batch.with_tables(kv.block_size)
            return super().__call__(batch, kv)
        captured.graph.replay()
        self._last = captured.body, batch
        return captured.logits[: len(batch.sampling_rows)]

    def _rows(self, token_rows: Any) -> torch.Tensor:
        assert self._last is not None
        return self._last[1].places(token_rows)  # type: ignore[no-any-return]

    def capture(
        self, inputs: StepInputs, kv: GpuKV, buckets: Sequence[Bucket], progress: Callable[[float], None]
    ) -> None:
        """Capture a graph for each of `buckets`; `progress` is told the fraction done. For `inputs` and `kv` alone."""
        inputs.use_graphs(buckets)
        on_gpu = kv.pool.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

        def forward(batch: GpuBatch) -> tuple[torch.Tensor, ...]:
            batch = batch.with_tables(kv.block_size)
            body = self._body(batch, kv)
            return self._head(self._select(body, batch)), *body

        with torch.inference_mode():
            # All graphs put their results here: what each one kept would be as much again.
            largest = [torch.empty_like(result) for result in forward(inputs.empty_batch(buckets[-1]))]
            # The largest first: its memory is enough for the others.
            for number, bucket in enumerate(reversed(buckets), start=1):
                batch = inputs.empty_batch(bucket)
                results = [result[: bucket.sequences] for result in largest]

                def work(batch: GpuBatch = batch, results: list[torch.Tensor] = results) -> None:
                    for result, new in zip(results, forward(batch), strict=True):
                        result.copy_(new)

                graph = CudaGraph(work, pool, stream) if on_gpu else HostGraph(work)
                self._graphs[bucket] = _Captured(graph, results[0], tuple(results[1:]))
                progress(number / len(buckets))
