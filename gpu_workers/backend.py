"""The op set that models are written against; a device backend implements it (`gpu_workers.backends`).

Shapes: T flat tokens, S of them whose logits are wanted, H query heads, G KV heads, D head dimension, N and K output
and input features, I the width of a gated MLP.

A model's forward is a pure composition of these ops. A backend may carry them out one by one, on tensors in its compute
dtype, or record them once and replay the recording (`compile`): a model must not look into what an op returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.clock import Clock, HostClock
from gpu_workers.comm import Comm
from gpu_workers.drawn import Drawn, Known
from gpu_workers.prepare import PreparedStep, prepare
from gpu_workers.prompt_scores import TokenScores, token_scores
from gpu_workers.rows import Ints, Rows
from gpu_workers.sampling import PackedMask, SamplingBatch, TokenMask, argmax, choose_tokens, sample
from gpu_workers.weights.quantized import QuantizedWeight

Weight = Any  # what `load_linear` returned: its layout is the backend's own business
Batch = Any  # what `Backend.prepare` returned, or a ForwardBatch
Array = Any  # what an op returned: a tensor, or its place in a recording
LoadedWeight = torch.Tensor | QuantizedWeight  # [N, K] as it comes from a checkpoint


class Compiled:
    """A forward that runs on batches from `Backend.prepare`."""

    def __init__(
        self,
        body: Callable[[Any, Any], Any],
        select: Callable[[Any, Any], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """See `Backend.compile`."""
        self._body = body
        self._select = select
        self._head = head
        self._last: tuple[Any, Batch] | None = None

    def __call__(self, batch: Any, kv: Any) -> torch.Tensor:
        """[S, vocabulary] float32 logits, good until the next run."""
        body = self._body(batch, kv)
        self._last = body, batch
        return self._head(self._select(body, batch))

    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, hidden] float32: what the head reads of such tokens, good until the next run; see `more_logits`."""
        return self._selected(token_rows).float()

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, vocabulary] float32 logits of R flat tokens of the batch that was run last, good until the next run."""
        return self._head(self._selected(token_rows))

    def _selected(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        if self._last is None:
            raise RuntimeError("no batch has been run yet")
        body, batch = self._last
        return self._select(body, replace(batch, logits_rows=self._rows(token_rows)))

    def _rows(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """Where flat tokens of a plan are in the last batch."""
        return torch.from_numpy(token_rows)

    @torch.inference_mode()
    def best_ids(self, batch: Any, kv: Any) -> NDArray[np.int64]:
        """The ids [S] of the largest logits, the lowest one of equals. Raises FloatingPointError on NaN."""
        return argmax(self(batch, kv))


class Backend(ABC):
    """One device's implementation of the op set."""

    device: torch.device
    dtype: torch.dtype

    takes_quantized = False  # whether the `load_` methods accept QuantizedWeight
    keeps_quantized_table = False  # whether `load_vocabulary` keeps a table in the integers it is given

    # Whether forwards and draws return before they are done: then the next step can be prepared meanwhile, and the
    # tokens that one step draws reach the next one on the device.
    overlaps = False
    clock: Clock = HostClock()

    @abstractmethod
    def load_linear(self, weight: LoadedWeight, bias: torch.Tensor | None, partial: bool = False) -> Weight:
        """Prepare a [N, K] weight and an optional [N] bias for `linear`; called once a weight.

        `partial`: its products are summed over ranks, so they stay float32 until then.
        """

    @abstractmethod
    def load_gated_linear(self, weight: LoadedWeight, bias: torch.Tensor | None) -> Weight:
        """Prepare a [2 I, K] weight, the rows of the gate before those that it gates, for `gated_linear`."""

    @abstractmethod
    def load_vocabulary(self, table: LoadedWeight, head: LoadedWeight | None) -> tuple[Weight, Weight]:
        """Prepare [vocabulary, hidden] weights for `embed` and for `logits`; no `head`: it is the table."""

    @abstractmethod
    def load_norm(self, weight: torch.Tensor) -> Weight:
        """Prepare the [K] weight of a norm."""

    @abstractmethod
    def load_rope(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep the tables [positions, D / 2], float32, of `rope_and_write`; called once."""

    @abstractmethod
    def allocate_kv(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Any:
        """The paged KV pool of this rank; every layer's part is indexed by slot = block id * block_size + offset."""

    @abstractmethod
    def allocate_host_kv(self, kv: Any, num_blocks: int) -> Any:
        """Host memory for `num_blocks` blocks of the pool `kv`, of all layers, K and V."""

    def begin_copies(self, host_kv: Any) -> None:  # noqa: B027  (a CPU is done when a call returns)
        """The copies asked for next come after all that was launched so far, and wait for nothing launched later.

        Called in the thread that launches forwards, while no copy is under way.
        """

    @abstractmethod
    def copy_blocks_out(self, kv: Any, host_kv: Any, pairs: torch.Tensor) -> None:
        """Copy blocks to host memory; `pairs` [N, 2] int64: block id, host block id. Complete when it returns.

        Called in another thread than the forward that runs meanwhile, which touches none of these blocks.
        """

    @abstractmethod
    def copy_blocks_in(self, kv: Any, host_kv: Any, pairs: torch.Tensor) -> None:
        """The way back, as `copy_blocks_out`; `pairs` [N, 2] int64: host block id, block id."""

    def prepare(self, rows: Rows, scheduled: bytes) -> PreparedStep | None:
        """Check and flatten `StepPlan.scheduled`; None when it is empty. Raises `PlanError`.

        The batch is for forwards of this backend, and good until the next call.
        """
        return prepare(rows, scheduled, self.device)

    def compile(
        self, body: Callable[[Any, Any], Any], select: Callable[[Any, Any], Array], head: Callable[[Array], Array]
    ) -> "Compiled":
        """A forward as something that runs: the logits are `head(select(body(batch, kv), batch))`.

        `select` begins with `select_logits_rows` and gives hidden states [S, hidden]: what comes before it does not
        depend on which rows' logits are wanted.
        """
        return Compiled(body, select, head)

    def capture(
        self, compiled: "Compiled", rows: Rows, kv: Any, sequences: Sequence[int], progress: Callable[[float], None]
    ) -> None:
        """Make decode steps of up to these numbers of sequences cheaper to launch, where a backend can.

        `compiled` is from `compile`, `rows` and `kv` those of all steps to come; `progress` is told the fraction done.
        """
        progress(1.0)  # here, nothing makes them cheaper

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> NDArray[np.int64]:
        """See `gpu_workers.sampling.choose_tokens`: the same tokens, but where two sums round differently."""
        return choose_tokens(logits, batch)

    def draw(
        self,
        logits: torch.Tensor,
        batch: Batch,
        settings: SamplingBatch | None,
        mask: TokenMask | PackedMask | None = None,
    ) -> Drawn:
        """Sample from logits [S, V] float32, which are overwritten, of a batch from `prepare`.

        `settings` None: greedily. See `gpu_workers.sampling.sample`. The mask is packed for who overlaps.
        """
        assert not isinstance(mask, PackedMask), "this backend does not overlap"
        if settings is None:
            return Known(argmax(logits))
        return Known(*sample(logits, settings, mask, self.choose_tokens))

    def score(self, logits: torch.Tensor, token_ids: Ints, k: int) -> TokenScores:
        """See `gpu_workers.prompt_scores.token_scores`; logits are as `Compiled.more_logits` gave them."""
        return token_scores(logits, token_ids, k)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[Any]]]:
        """Start to bring scores of a step to the host; what is returned waits for them.

        To be waited for before the next but one call.
        """
        arrays = [tensor.numpy() for tensor in tensors]
        return lambda: arrays

    @abstractmethod
    def embed(self, table: Weight, batch: Batch, first: int = 0) -> Array:
        """[T, hidden]: row id - first of the table for each token id, zeros for ids that it has no row for."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """RMSNorm over the last axis (Zhang & Sennrich 2019), computed in float32."""

    @abstractmethod
    def add_rms_norm(self, x: Array, residual: Array, weight: Weight, eps: float) -> tuple[Array, Array]:
        """(normed(x + residual), x + residual)."""

    @abstractmethod
    def select_logits_rows(self, x: Array, batch: Batch) -> Array:
        """[T, ...] -> [S, ...]."""

    @abstractmethod
    def linear(self, x: Array, weight: Weight) -> Array:
        """[T, K] -> [T, N]; with `deterministic`, a row's result does not depend on the other rows or on T."""

    @abstractmethod
    def gated_linear(self, x: Array, weight: Weight, kind: str) -> Array:
        """[T, K] -> [T, I]: act(gate) * up; `kind` is "silu" or "gelu" (tanh form)."""

    @abstractmethod
    def logits(self, x: Array, head: Weight) -> Array:
        """[S, hidden] -> [S, vocabulary], float32."""

    @abstractmethod
    def rope_and_write(self, qkv: Array, num_heads: int, kv: Any, layer: int, batch: Batch) -> Array:
        """Rotate q and k by position and write k and v into the pool.

        `qkv` [T, (H + 2 G) D] has the query, key and value heads in that order; the rotated q is returned, for
        `attention`.
        """

    @abstractmethod
    def attention(self, q: Array, kv: Any, layer: int, batch: Batch, window: int = 0) -> Array:
        """Causal attention over the paged pool -> [T, H * D].

        The query at position p attends to the positions 0..p of its sequence or, with a window, to the last `window` of
        them.
        """

    @abstractmethod
    def all_reduce(self, x: Array, comm: Comm) -> Array:
        """The sum of all ranks' `x`."""
