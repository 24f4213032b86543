"""The op set in Triton kernels (`kernels.gpu`) and libraries' products, on a GPU or under Triton's interpreter.

Activations are in the compute dtype, norms, rotation, softmax and sums of products in float32 inside their kernels. A
quantized weight stays the integers it consists of, and is multiplied by activations in the compute dtype. Decode
steps are CUDA graphs, where they were captured.

With `deterministic`, a row's result does not depend on its batch: products and attention then have one order of sums,
whatever the number of rows. Norms, activations, rotation and sampling have that always.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu_workers.backend import Backend, Compiled, LoadedWeight
from gpu_workers.backends.triton_graphs import GraphCompiled, buckets_of
from gpu_workers.backends.triton_inputs import GpuBatch, StepInputs
from gpu_workers.backends.triton_kv import GpuHostKV, GpuKV
from gpu_workers.backends.triton_sampling import DeviceSampler
from gpu_workers.backends.triton_transfer import Download
from gpu_workers.clock import HostClock, StreamClock
from gpu_workers.comm import Comm
from gpu_workers.drawn import Drawn
from gpu_workers.prepare import PreparedStep
from gpu_workers.prompt_scores import TokenScores
from gpu_workers.rows import Ints, Rows
from gpu_workers.sampling import PackedMask, SamplingBatch, TokenMask
from gpu_workers.weights.quantized import QuantizedWeight
from ipc.control import StartError
from kernels.gpu.activation import gated_activation
from kernels.gpu.attention_tile import HEAD_STEP, LARGEST_HEAD
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.embedding import embed
from kernels.gpu.matmul import matmul
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.pack import PackedIntegers, largest_group, pack_integers
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.rope import rope_and_write
from kernels.gpu.sampling import log_probabilities
from kernels.gpu.tables import choose
from kernels.gpu.weight_only import weight_only_matmul


@dataclass(slots=True, frozen=True)
class Linear:
    """A prepared [N, K] weight and its bias."""

    weight: torch.Tensor | PackedIntegers
    bias: torch.Tensor | None
    out_dtype: torch.dtype


class TritonBackend(Backend):
    """See `gpu_workers.backends.make_backend`."""

    overlaps = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, deterministic: bool, quantized: bool, kv_dtype: str
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.takes_quantized = quantized
        self.clock = StreamClock() if device.type == "cuda" else HostClock()
        # Sums of parts of a product stay in float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._deterministic = deterministic
        self._kv_dtype = kv_dtype
        self._cos = self._sin = torch.empty(0)
        self._inputs: StepInputs | None = None
        self._sampler: DeviceSampler | None = None
        self._score_download = Download(device)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load_linear(self, weight: LoadedWeight, bias: torch.Tensor | None, partial: bool = False) -> Linear:
        return self._load(weight, bias, torch.float32 if partial else self.dtype)

    def load_gated_linear(self, weight: LoadedWeight, bias: torch.Tensor | None) -> Linear:
        return self._load(weight, bias, self.dtype)

    def load_vocabulary(self, table: LoadedWeight, head: LoadedWeight | None) -> tuple[torch.Tensor, Linear]:
        """The table in the compute dtype, since rows of it are read; a head of its own as it is kept."""
        rows = self._to_device(table.dequantize() if isinstance(table, QuantizedWeight) else table)
        if head is None:
            return rows, Linear(rows, None, torch.float32)
        return rows, self._load(head, None, torch.float32)

    def load_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return self._to_device(weight)

    def _load(self, weight: LoadedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Linear:
        there = None if bias is None else self._to_device(bias)
        if not isinstance(weight, QuantizedWeight):
            return Linear(self._to_device(weight), there, out_dtype)
        group = largest_group(weight.scales, weight.minimums)
        packed = pack_integers(weight.codes, weight.scales, weight.minimums, group, self.dtype, self.device)
        return Linear(packed, there, out_dtype)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy, also where nothing has to be converted: a view would keep the whole file mapped.
        return tensor.to(self.device, self.dtype, copy=True).contiguous()

    def load_rope(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cos, self._sin = (table.float().contiguous().to(self.device) for table in (cos, sin))

    def allocate_kv(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> GpuKV:
        if head_dim % HEAD_STEP or head_dim > LARGEST_HEAD:
            raise StartError(
                f"This model's heads have {head_dim} dimensions; the GPU kernels take multiples of {HEAD_STEP} up to "
                f"{LARGEST_HEAD}."
            )
        return GpuKV.allocate(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self._kv_dtype, self.device)

    def allocate_host_kv(self, kv: GpuKV, num_blocks: int) -> GpuHostKV:
        return GpuHostKV(kv, num_blocks)

    def begin_copies(self, host_kv: GpuHostKV) -> None:
        host_kv.begin_copies()

    def copy_blocks_out(self, kv: GpuKV, host_kv: GpuHostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_out(kv, pairs)

    def copy_blocks_in(self, kv: GpuKV, host_kv: GpuHostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_in(kv, pairs)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _inputs_of(self, rows: Rows) -> StepInputs:
        """The device's copy of what a runner knows; another runner's is forgotten."""
        if self._inputs is None or self._inputs.rows is not rows:
            self._inputs = StepInputs(rows, self.device)
            self._sampler = DeviceSampler(self.device)
        return self._inputs

    def prepare(self, rows: Rows, scheduled: bytes) -> PreparedStep | None:
        return self._inputs_of(rows).prepare(scheduled)

    def compile(
        self,
        body: Callable[[Any, Any], tuple[torch.Tensor, ...]],
        select: Callable[[Any, Any], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> GraphCompiled:
        return GraphCompiled(body, select, head)

    def capture(
        self, compiled: Compiled, rows: Rows, kv: Any, sequences: Sequence[int], progress: Callable[[float], None]
    ) -> None:
        assert isinstance(compiled, GraphCompiled)
        compiled.capture(self._inputs_of(rows), kv, buckets_of(sequences, rows.max_model_len), progress)

    def draw(
        self,
        logits: torch.Tensor,
        batch: GpuBatch,
        settings: SamplingBatch | None,
        mask: TokenMask | PackedMask | None = None,
    ) -> Drawn:
        assert self._sampler is not None, "a batch was prepared"
        if settings is None:
            return self._sampler.greedy(logits, batch)
        assert not isinstance(mask, TokenMask), "a backend that overlaps is given packed masks"
        return self._sampler.draw(logits, batch, settings, mask)

    def score(self, logits: torch.Tensor, token_ids: Ints, k: int) -> TokenScores:
        # A copy, also where the device is this CPU: kernels are compiled for addresses that divide by 16.
        there = torch.from_numpy(token_ids).to(self.device, copy=True)
        chosen, top_ids, top_values, ranks = log_probabilities(logits, there, top=k)
        return TokenScores(chosen, ranks, top_ids, top_values)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[Any]]]:
        return self._score_download.start(tensors).wait

    # --- ops ---------------------------------------------------------------------------------------------------------

    def embed(self, table: torch.Tensor, batch: GpuBatch, first: int = 0) -> torch.Tensor:
        return embed(table, batch.input_ids(), first=first)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def select_logits_rows(self, x: torch.Tensor, batch: GpuBatch) -> torch.Tensor:
        return x.index_select(0, batch.logits_rows)

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        matrix = weight.weight
        if isinstance(matrix, PackedIntegers):
            y: torch.Tensor = weight_only_matmul(
                x, matrix, weight.bias, deterministic=self._deterministic, out_dtype=weight.out_dtype
            )
            return y
        if self._by_triton(x, matrix, weight.out_dtype):
            y = matmul(x, matrix, weight.bias, out_dtype=weight.out_dtype)
            return y
        if weight.out_dtype == x.dtype:
            return F.linear(x, matrix, weight.bias)
        y = torch.mm(x, matrix.t(), out_dtype=weight.out_dtype)
        return y if weight.bias is None else y.add_(weight.bias)

    def _by_triton(self, x: torch.Tensor, matrix: torch.Tensor, out_dtype: torch.dtype) -> bool:
        """Whether a product is the Triton kernel's, with one order of sums; else it is the library's."""
        if self._deterministic or (x.dtype != out_dtype and not x.is_cuda):
            return True
        (rows, inputs), outputs = x.shape, matrix.shape[0]
        return bool(choose("linear", m=rows, n=outputs, k=inputs)["implementation"] == "triton")

    def gated_linear(self, x: torch.Tensor, weight: Linear, kind: str) -> torch.Tensor:
        return gated_activation(self.linear(x, weight), kind)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return self.linear(x, head)

    def rope_and_write(self, qkv: torch.Tensor, num_heads: int, kv: GpuKV, layer: int, batch: GpuBatch) -> torch.Tensor:
        keys, values, key_scales, value_scales = kv.layer(layer)
        return rope_and_write(
            qkv,
            batch.positions,
            batch.slots,
            self._cos,
            self._sin,
            keys,
            values,
            num_heads,
            k_scales=key_scales,
            v_scales=value_scales,
        )

    def attention(self, q: torch.Tensor, kv: GpuKV, layer: int, batch: GpuBatch, window: int = 0) -> torch.Tensor:
        keys, values, key_scales, value_scales = kv.layer(layer)
        tables, chunk_starts = batch.block_tables, batch.chunk_starts
        assert tables is not None, "a forward makes what all layers share first"
        assert chunk_starts is not None
        shared: dict[str, Any] = {
            "scale": q.shape[-1] ** -0.5,
            "window": window,
            "k_scales": key_scales,
            "v_scales": value_scales,
            "max_context": batch.max_context,
        }
        out = torch.empty_like(q)
        decodes = batch.num_decodes
        if decodes:
            ours = q[:decodes], keys, values, tables[:decodes]
            contexts, shared["out"] = batch.context_lens[:decodes], out[:decodes]
            if self._deterministic:  # with the order of sums that prefill rows have; apart, so that they can be split
                starts = batch.query_starts[: decodes + 1]
                prefill_attention(*ours, starts, contexts, max_query_len=1, deterministic=True, **shared)
            else:
                decode_attention(*ours, contexts, **shared)
        if decodes < len(tables):
            prefill_attention(
                q[decodes:],
                keys,
                values,
                tables[decodes:],
                chunk_starts,
                batch.context_lens[decodes:],
                max_query_len=batch.longest_chunk,
                deterministic=self._deterministic,
                **(shared | {"out": out[decodes:]}),
            )
        return out.flatten(1)

    def all_reduce(self, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        return comm.all_reduce(x).to(self.dtype)
