"""The op set that models are written against; a device backend implements it (`gpu_workers.backends`).

Shapes: T flat tokens, H query heads, G KV heads, D head dimension, N and K output and input features. Tensors are in
the backend's compute dtype unless said otherwise.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch

from gpu_workers.batch import ForwardBatch

Weight = Any  # what `load_linear` returned: its layout is the backend's own business


class Backend(ABC):
    """One device's implementation of the op set."""

    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def load_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Weight:
        """Prepare a [N, K] weight (any float dtype) and an optional [N] bias for `linear`; called once a weight.

        `out_dtype` is that of the products where it is not the compute dtype: float32 for logits and for partial sums.
        """

    @abstractmethod
    def load_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Place a norm weight or an embedding table on the device, in the compute dtype."""

    @abstractmethod
    def load_rope(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep the tables [positions, D / 2], float32, of `rope_and_write`; called once."""

    @abstractmethod
    def allocate_kv(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Any:
        """The paged KV pool of this rank; every layer's part is indexed by slot = block id * block_size + offset."""

    @abstractmethod
    def allocate_host_kv(self, kv: Any, num_blocks: int) -> Any:
        """Host memory for `num_blocks` blocks of the pool `kv`, of all layers, K and V."""

    @abstractmethod
    def copy_blocks_out(self, kv: Any, host_kv: Any, pairs: torch.Tensor) -> None:
        """Copy blocks to host memory; `pairs` [N, 2] int64: block id, host block id. Complete when it returns.

        Called in another thread than the forward that runs meanwhile, which touches none of these blocks.
        """

    @abstractmethod
    def copy_blocks_in(self, kv: Any, host_kv: Any, pairs: torch.Tensor) -> None:
        """The way back, as `copy_blocks_out`; `pairs` [N, 2] int64: host block id, block id."""

    @abstractmethod
    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis (Zhang & Sennrich 2019), computed in float32."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed(x + residual), x + residual)."""

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """[T, K] -> [T, N]; with `deterministic`, a row's result does not depend on the other rows or on T."""

    @abstractmethod
    def rope_and_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: Any, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Rotate q [T, H, D] and k [T, G, D] by position and write k and v into the pool; returns the rotated q."""

    @abstractmethod
    def attention(self, q: torch.Tensor, kv: Any, layer: int, batch: ForwardBatch) -> torch.Tensor:
        """Causal attention of q [T, H, D] over the paged pool -> [T, H * D]."""

    @abstractmethod
    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """[T, 2 I] -> [T, I]: act(first half) * second half; `kind` is "silu" or "gelu" (tanh form)."""
