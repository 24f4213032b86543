"""The op set in plain torch operations on a CPU, with rows that do not depend on the batch they are computed in.

What makes a row's bits depend on the other rows is a library that picks its kernel, and with it the order of the sums,
by the number of rows. Measured with torch 2.13 on an AVX2 machine, float32, 1 to 600 rows, 1 and 2 threads, and on one
with AMX, 1 to 3 threads:

- MKL (`torch.mm`, `F.linear`, `torch.bmm`): 1, 2 and 3 rows differ from all others, as do the 1 to 3 rows that are left
  over where it splits 5, 6, 7, 9, 10 or 11 rows between two threads. A multiple of 4 rows, by a multiple of 4 columns,
  is computed alike; where 3 or 4 threads divide 40 columns between them it is not, hence a multiple of 16 for weights.
  With AVX-512 that is not enough: products of always 32 rows are computed alike, always 64 are not.
- oneDNN with weights packed for 32 rows: identical for every number of rows and threads (with AVX-512, from two rows
  on), and the fastest for few rows, as it reads the weights once (a padded MKL product splits the rows, so each thread
  reads them all). Not so bfloat16 with AMX, for more rows than the weights are packed for: up to those it is.
- torch's reductions over the last axis, and exp and tanh: identical everywhere. silu, sigmoid and gelu are not: up to
  15 elements at the end of each thread's share take another path. They are composed of exp and tanh here.

`tests/unit/gpu_workers/test_torch_cpu.py` holds all of this on whatever machine it runs.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpu_workers.backend import Backend, LoadedWeight
from gpu_workers.backends.host_kv import HostKV
from gpu_workers.backends.torch_attention import AttentionPlan, PagedKV, attend
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm

_LEAST_PACKED_ROWS = 4  # with AVX-512, oneDNN takes another kernel for a single row of some shapes
_PACKED_ROWS = 32  # the row count oneDNN lays weights out for; at 1 it takes another kernel for single rows
_MKL_ROWS = 32  # of each product of unpacked weights


@dataclass(slots=True, frozen=True)
class Linear:
    """A prepared [N, K] weight. `operand` is the dtype its products are computed from."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    features: int  # N; unpacked weights have rows of zeros up to a multiple of 16
    operand: torch.dtype
    out_dtype: torch.dtype


def create(dtype: torch.dtype, threads: int | None, deterministic: bool) -> "TorchCpuBackend":
    """See `gpu_workers.backends.make_backend`."""
    if threads is not None:
        torch.set_num_threads(threads)
    return TorchCpuBackend(dtype, deterministic)


def _has_fast_bfloat16() -> bool:
    """Whether bfloat16 products beat float32 ones here: without hardware for them they are 10 times slower."""
    return bool(torch.cpu._is_avx512_bf16_supported())


class TorchCpuBackend(Backend):
    """Activations and KV are in `dtype`; norms, rotation, attention and the sums of products are in float32.

    With bfloat16 on a CPU without instructions for it, weights are rounded to bfloat16 but kept as float32, and
    multiplied in float32: the products are the same, and the sums are no less exact.
    """

    def __init__(self, dtype: torch.dtype, deterministic: bool, packed: bool | None = None) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self._deterministic = deterministic
        self._packed = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        if packed is not None:
            self._packed = packed
        self._bf16_products = dtype == torch.bfloat16 and self._packed and _has_fast_bfloat16()
        self._cos = self._sin = torch.empty(0)
        self._plan: AttentionPlan | None = None

    def load_linear(self, weight: LoadedWeight, bias: torch.Tensor | None, partial: bool = False) -> Linear:
        return self._load(weight, bias, torch.float32 if partial else self.dtype)

    def load_gated_linear(self, weight: LoadedWeight, bias: torch.Tensor | None) -> Linear:
        return self._load(weight, bias, self.dtype)

    def load_vocabulary(self, table: LoadedWeight, head: LoadedWeight | None) -> tuple[torch.Tensor, Linear]:
        return self.load_norm(_as_tensor(table)), self._load(table if head is None else head, None, torch.float32)

    def load_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype, copy=True)

    def _load(self, loaded: LoadedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Linear:
        weight = _as_tensor(loaded)
        operand = torch.bfloat16 if self._bf16_products and out_dtype == torch.bfloat16 else torch.float32
        features = weight.shape[0]
        weight = weight.to(self.dtype).to(operand)
        if bias is not None:
            bias = bias.to(self.dtype).to(operand)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        else:
            weight = F.pad(weight, (0, 0, 0, -features % 16)).contiguous()
            bias = None if bias is None else F.pad(bias, (0, -features % 16))
        return Linear(weight, bias, features, operand, out_dtype)

    def load_rope(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cos, self._sin = cos, sin

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> PagedKV:
        return PagedKV.allocate(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.dtype)

    def allocate_host_kv(self, kv: PagedKV, num_blocks: int) -> HostKV:
        return HostKV.allocate(kv, num_blocks)

    def copy_blocks_out(self, kv: PagedKV, host_kv: HostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_out(kv, pairs)

    def copy_blocks_in(self, kv: PagedKV, host_kv: HostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_in(kv, pairs)

    def embed(self, table: torch.Tensor, batch: ForwardBatch, first: int = 0) -> torch.Tensor:
        rows = batch.token_ids - first
        elsewhere = (rows < 0) | (rows >= table.shape[0])
        if not elsewhere.any():
            return table.index_select(0, rows)
        return table.index_select(0, rows.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # Rounded before the product with the weight, as bfloat16 models are trained and published.
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(self.dtype).mul_(weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def select_logits_rows(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return x[batch.logits_rows]

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return self.linear(x, head)

    def gated_linear(self, x: torch.Tensor, weight: Linear, kind: str) -> torch.Tensor:
        return self.gated_activation(self.linear(x, weight), kind)

    def all_reduce(self, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        return comm.all_reduce(x).to(self.dtype)

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        x = x.to(weight.operand)
        if not self._packed:
            most, least = _MKL_ROWS, _MKL_ROWS
        else:
            most, least = _PACKED_ROWS if weight.operand == torch.bfloat16 else x.shape[0], _LEAST_PACKED_ROWS
        if not self._deterministic or (least <= x.shape[0] <= most):
            y = self._product(x, weight)
        else:
            y = torch.cat([self._product(_padded(rows, least), weight)[: len(rows)] for rows in torch.split(x, most)])
        return y.to(weight.out_dtype)

    def _product(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        y: torch.Tensor
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, weight.weight, weight.bias, "none", [], "")
            return y
        return F.linear(x, weight.weight, weight.bias)[:, : weight.features]

    def rope_and_write(
        self, qkv: torch.Tensor, num_heads: int, kv: PagedKV, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        plan = self._plan_of(batch, kv)
        heads = qkv.view(qkv.shape[0], num_heads + 2 * kv.num_kv_heads, -1)
        q, k, v = torch.split(heads, [num_heads, kv.num_kv_heads, kv.num_kv_heads], dim=1)
        kv.write(layer, plan, self._rotate(k, plan), v)
        return self._rotate(q, plan)

    def _rotate(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        half = x.shape[-1] // 2
        x = x.float()
        rotated = x * plan.cos
        crossed = x * plan.sin
        rotated[..., :half] -= crossed[..., half:]
        rotated[..., half:] += crossed[..., :half]
        return rotated.to(self.dtype)

    def attention(self, q: torch.Tensor, kv: PagedKV, layer: int, batch: ForwardBatch, window: int = 0) -> torch.Tensor:
        return attend(q, kv, layer, self._plan_of(batch, kv), window).to(self.dtype)

    def _plan_of(self, batch: ForwardBatch, kv: PagedKV) -> AttentionPlan:
        """All layers of a forward share the indices and masks, so they are computed once."""
        if self._plan is None or self._plan.batch is not batch:
            self._plan = AttentionPlan.build(batch, kv, self._cos, self._sin)
        return self._plan

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """[T, 2 I] -> [T, I]: act(first half) * second half."""
        gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
        if kind == "silu":
            activated = gate / torch.neg(gate).exp_().add_(1)
        else:
            inner = (gate * gate * gate).mul_(0.044715).add_(gate).mul_(math.sqrt(2 / math.pi))
            activated = inner.tanh_().add_(1).mul_(gate).mul_(0.5)
        if self.dtype == torch.float32:
            return activated.mul_(up)
        # A bfloat16 model rounds the activation before the product, and the product.
        return activated.to(self.dtype).mul_(up.to(self.dtype))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows of zeros up to so many."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x


def _as_tensor(weight: LoadedWeight) -> torch.Tensor:
    """This backend says that it takes no quantized weights, but a model may hold some beside others."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()
