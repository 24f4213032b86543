"""Llama and its relatives (Mistral, Qwen2): pre-norm decoder with grouped-query attention, RoPE and a gated MLP.

Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024). What differs between them (biases, head size, rope
settings, tied embeddings) is in `ModelArch`. Under tensor parallelism each rank has the query heads of some KV groups,
a slice of the MLP and a slice of the vocabulary (Shoeybi et al. 2019).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from config.schema import ModelArch
from gpu_workers.backend import Backend, Weight
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm
from gpu_workers.weights.source import Weights
from ipc.control import StartError
from kernels.reference import rope_frequencies, rope_tables


@dataclass(slots=True, frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Weight  # rows: the rank's query heads, its key heads, its value heads
    output: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight


class LlamaModel:
    """Rank `comm.rank`'s share of the model, its weights taken from `weights`.

    `max_length`: longest sequence that will be computed (None: what the model declares). StartError when tensors are
    missing, unknown or of the wrong shape, or when the model can't be split over `comm.size` ranks.
    """

    def __init__(self, arch: ModelArch, max_length: int | None, weights: Weights, backend: Backend, comm: Comm) -> None:
        check_tensor_parallel(arch, comm.size)
        self.arch = arch
        self.backend = backend
        self.comm = comm
        self.num_heads = arch.num_heads // comm.size
        self.num_kv_heads = arch.num_kv_heads // comm.size
        self._vocab_shard = -(-arch.vocab_size // comm.size)
        self._vocab_start = comm.rank * self._vocab_shard
        expected = expected_tensors(arch)
        weights.require(expected)
        weights.forbid_others(expected, ignored=_is_derived)
        self._load_rope(weights, max_length or arch.max_position)
        embedding = self._vocabulary_rows(weights.take("model.embed_tokens.weight"))
        self._embedding = backend.load_tensor(embedding)
        head = embedding if arch.tie_embeddings else self._vocabulary_rows(weights.take("lm_head.weight"))
        self._head = backend.load_linear(head, None, torch.float32)
        self._norm = backend.load_tensor(weights.take("model.norm.weight"))
        del embedding, head
        self._layers = [self._load_layer(weights, f"model.layers.{index}.") for index in range(arch.num_layers)]

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load_rope(self, weights: Weights, length: int) -> None:
        rope = self.arch.rope
        frequencies, scale = rope_frequencies(
            self.arch.head_dim,
            rope.theta,
            rope.type,
            factor=rope.factor,
            original_max_position=rope.original_max_position,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            attention_factor=rope.attention_factor,
            max_length=length,
        )
        if "rope_freqs.weight" in weights:  # GGUF files of Llama 3.1 have its scaling as divisors
            weights.require({"rope_freqs.weight": tuple(frequencies.shape)})
            frequencies = frequencies / weights.take("rope_freqs.weight").float()
        self.backend.load_rope(*rope_tables(frequencies, scale, length))

    def _load_layer(self, weights: Weights, prefix: str) -> _Layer:
        arch, backend = self.arch, self.backend
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            attention_norm=backend.load_tensor(weights.take(prefix + "input_layernorm.weight")),
            qkv=self._column_parallel(weights, [f"{attention}{name}_proj" for name in "qkv"], arch.qkv_bias),
            output=self._row_parallel(weights, attention + "o_proj", arch.o_bias),
            mlp_norm=backend.load_tensor(weights.take(prefix + "post_attention_layernorm.weight")),
            gate_up=self._column_parallel(weights, [mlp + "gate_proj", mlp + "up_proj"], arch.mlp_bias),
            down=self._row_parallel(weights, mlp + "down_proj", arch.mlp_bias),
        )

    def _column_parallel(self, weights: Weights, names: list[str], has_bias: bool) -> Weight:
        """Several linears of the same input as one, of each this rank's slice of the output features."""
        merged = torch.cat([self._slice(weights.take(f"{name}.weight"), 0) for name in names])
        bias = torch.cat([self._slice(weights.take(f"{name}.bias"), 0) for name in names]) if has_bias else None
        return self.backend.load_linear(merged, bias)

    def _row_parallel(self, weights: Weights, name: str, has_bias: bool) -> Weight:
        """This rank's slice of the input features: its result is a summand, so it stays float32 until it is summed."""
        bias = weights.take(f"{name}.bias") if has_bias else None
        partial = torch.float32 if self.comm.size > 1 else None
        weight = self._slice(weights.take(f"{name}.weight"), 1)
        return self.backend.load_linear(weight, bias if self.comm.rank == 0 else None, partial)

    def _slice(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        size = tensor.shape[axis] // self.comm.size
        return tensor.narrow(axis, self.comm.rank * size, size)

    def _vocabulary_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows; the last rank's are filled up with zeros where the ranks don't divide the vocabulary."""
        rows = tensor[self._vocab_start : self._vocab_start + self._vocab_shard]
        return F.pad(rows, (0, 0, 0, self._vocab_shard - rows.shape[0]))

    # --- running -----------------------------------------------------------------------------------------------------

    def allocate_kv(self, num_blocks: int, block_size: int) -> Any:
        """This rank's KV pool, for `forward`."""
        arch = self.arch
        return self.backend.allocate_kv(arch.num_layers, num_blocks, block_size, self.num_kv_heads, arch.head_dim)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Logits [S, vocabulary], float32, of the batch's `logits_rows`, on every rank; K and V go into `kv`."""
        backend, eps = self.backend, self.arch.rms_norm_eps
        residual = self._embed(batch.token_ids)
        x = backend.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x, residual = backend.add_rms_norm(x, residual, layer.attention_norm, eps)
            x = self._attention(x, layer, index, batch, kv)
            x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = backend.gated_activation(backend.linear(x, layer.gate_up), self.arch.hidden_act)
            x = self._sum_over_ranks(backend.linear(x, layer.down))
        rows = batch.logits_rows
        x, _ = backend.add_rms_norm(x[rows], residual[rows], self._norm, eps)
        return self.comm.all_gather(backend.linear(x, self._head))[:, : self.arch.vocab_size]

    def _attention(self, x: torch.Tensor, layer: _Layer, index: int, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        qkv = self.backend.linear(x, layer.qkv).view(x.shape[0], -1, self.arch.head_dim)
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q = self.backend.rope_and_write(q, k, v, kv, index, batch)
        return self._sum_over_ranks(self.backend.linear(self.backend.attention(q, kv, index, batch), layer.output))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return self.backend.embed(self._embedding, token_ids)
        local = token_ids - self._vocab_start
        elsewhere = (local < 0) | (local >= self._vocab_shard)
        rows = self.backend.embed(self._embedding, local.masked_fill(elsewhere, 0))
        return self.comm.all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def _sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(x).to(self.backend.dtype)


def check_tensor_parallel(arch: ModelArch, size: int) -> None:
    """StartError, with the values that would do, when `arch` can't be split evenly over `size` ranks."""
    sizes = (arch.num_kv_heads, arch.num_heads, arch.intermediate_size)
    if any(count % size for count in sizes):
        valid = [str(n) for n in range(1, arch.num_kv_heads + 1) if not any(count % n for count in sizes)]
        raise StartError(
            f"--tp {size} does not divide this model's {arch.num_kv_heads} KV heads, {arch.num_heads} attention heads "
            f"and intermediate size {arch.intermediate_size} evenly; valid values: {', '.join(valid)}."
        )


def expected_tensors(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, under its Hugging Face name."""
    hidden, width = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, arch.qkv_bias),
        "self_attn.k_proj": (keys, hidden, arch.qkv_bias),
        "self_attn.v_proj": (keys, hidden, arch.qkv_bias),
        "self_attn.o_proj": (hidden, queries, arch.o_bias),
        "mlp.gate_proj": (width, hidden, arch.mlp_bias),
        "mlp.up_proj": (width, hidden, arch.mlp_bias),
        "mlp.down_proj": (hidden, width, arch.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    for index in range(arch.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _is_derived(name: str) -> bool:
    """Tensors that some checkpoints have beside the weights: a copy of the tied embedding, and rope frequencies."""
    return name in ("lm_head.weight", "rope_freqs.weight") or name.endswith("rotary_emb.inv_freq")
