"""Llama and its relatives (Mistral, Qwen2): pre-norm decoder with grouped-query attention, RoPE and a gated MLP.

Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024). What differs between them (biases, head size, rope
settings, sliding windows, tied embeddings) is in `ModelArch`. Under tensor parallelism each rank has some heads, a
slice of the MLP and a slice of the vocabulary: see `config.shards`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from config.schema import ModelArch
from config.shards import Span, most_ranks, shard
from gpu_workers.backend import Array, Backend, LoadedWeight, Weight
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm
from gpu_workers.rows import Rows
from gpu_workers.weights.quantized import QuantizedWeight, cat
from gpu_workers.weights.source import Weights
from ipc.control import StartError
from kernels.reference import rope_frequencies, rope_tables


@dataclass(slots=True, frozen=True)
class _Layer:
    attention_norm: Weight
    qkv: Weight  # rows: the rank's query heads, its key heads, its value heads
    output: Weight
    mlp_norm: Weight
    gate_up: Weight
    down: Weight
    window: int  # positions that a token attends to; 0: all


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
        self._shard = shard(arch, comm.rank, comm.size)
        expected = expected_tensors(arch)
        weights.require(expected)
        weights.forbid_others(expected, ignored=_is_derived)
        self._load_rope(weights, max_length or arch.max_position)
        # Rounding what is going to be dequantized would cost accuracy and time for nothing.
        table_bits = 8 if backend.keeps_quantized_table else None
        table = self._vocabulary_rows(weights, "model.embed_tokens.weight", table_bits)
        head = None if arch.tie_embeddings else self._vocabulary_rows(weights, "lm_head.weight", 8)
        self._embedding, self._head = backend.load_vocabulary(table, head)
        del table, head
        self._norm = backend.load_norm(weights.take("model.norm.weight"))
        self._layers = [self._load_layer(weights, index) for index in range(arch.num_layers)]
        self._run = backend.compile(self._layers_of, self._final_states, self._local_logits)

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

    def _load_layer(self, weights: Weights, index: int) -> _Layer:
        arch, backend = self.arch, self.backend
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        inner = self._shard.mlp
        queries, keys = (span.times(arch.head_dim) for span in (self._shard.heads, self._shard.kv_heads))
        qkv = {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys}
        gate_up = {mlp + "gate_proj": inner, mlp + "up_proj": inner}
        return _Layer(
            attention_norm=backend.load_norm(weights.take(prefix + "input_layernorm.weight")),
            qkv=backend.load_linear(*self._column_parallel(weights, qkv, arch.qkv_bias)),
            output=self._row_parallel(weights, attention + "o_proj", queries, arch.o_bias),
            mlp_norm=backend.load_norm(weights.take(prefix + "post_attention_layernorm.weight")),
            gate_up=backend.load_gated_linear(*self._column_parallel(weights, gate_up, arch.mlp_bias)),
            down=self._row_parallel(weights, mlp + "down_proj", inner, arch.mlp_bias),
            window=arch.windows[index] if arch.windows else 0,
        )

    def _column_parallel(
        self, weights: Weights, outputs: dict[str, Span], has_bias: bool
    ) -> tuple[LoadedWeight, torch.Tensor | None]:
        """Weight and bias of several linears of the same input as one, of each the outputs that are named with it."""
        weight = self._take(weights, {f"{name}.weight": span for name, span in outputs.items()}, 0)
        bias = None
        if has_bias:
            biases = {name: weights.take(f"{name}.bias") for name in outputs}
            bias = torch.cat([biases[name].narrow(0, span.start, span.count) for name, span in outputs.items()])
        return weight, bias

    def _row_parallel(self, weights: Weights, name: str, inputs: Span, has_bias: bool) -> Weight:
        """The linear's part for `inputs`: its result is a summand of the whole."""
        bias = weights.take(f"{name}.bias") if has_bias and self.comm.rank == 0 else None
        weight = self._take(weights, {f"{name}.weight": inputs}, 1)
        return self.backend.load_linear(weight, bias, partial=self.comm.size > 1)

    def _take(self, weights: Weights, parts: dict[str, Span], axis: int, least_bits: int | None = 4) -> LoadedWeight:
        """Of each named matrix these rows (axis 0) or inputs (axis 1), as one.

        In integers, where the checkpoint has them in all parts, or they are asked for, and the backend multiplies them
        (`config.weight_formats` knows that). `least_bits`: see `Weights.take_quantized`.
        """
        if self.backend.takes_quantized:
            quantized = weights.take_quantized(parts, axis, least_bits)
            if quantized is not None:
                return cat(quantized) if len(quantized) > 1 else quantized[0]
        floats = [weights.take(name).narrow(axis, span.start, span.count) for name, span in parts.items()]
        return torch.cat(floats) if len(floats) > 1 else floats[0]

    def _vocabulary_rows(self, weights: Weights, name: str, least_bits: int | None) -> LoadedWeight:
        """This rank's rows; filled up with zeros where the ranks don't divide the vocabulary."""
        rows = self._take(weights, {name: self._shard.vocab}, 0, least_bits)
        missing = self._shard.vocab_rows - self._shard.vocab.count
        if not missing:
            return rows
        return rows.pad_rows(missing) if isinstance(rows, QuantizedWeight) else F.pad(rows, (0, 0, 0, missing))

    # --- running -----------------------------------------------------------------------------------------------------

    def allocate_kv(self, num_blocks: int, block_size: int) -> Any:
        """This rank's KV pool, for `forward`."""
        arch = self.arch
        kv_heads = self._shard.kv_heads.count
        return self.backend.allocate_kv(arch.num_layers, num_blocks, block_size, kv_heads, arch.head_dim)

    def capture(self, rows: Rows, kv: Any, sequences: Sequence[int], progress: Callable[[float], None]) -> None:
        """See `Backend.capture`."""
        self.backend.capture(self._run, rows, kv, sequences, progress)

    @torch.inference_mode()
    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        """Logits [S, vocabulary], float32, of the batch's `logits_rows`, on every rank; K and V go into `kv`.

        `batch` is what the backend's `prepare` returned.

        The logits are good until the next forward: a backend may write those to the same place.
        """
        return self.comm.all_gather(self._run(batch, kv))[:, : self.arch.vocab_size]

    @torch.inference_mode()
    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """As `forward`, of the R flat tokens `token_rows` of the batch that was run last: [R, vocabulary]."""
        return self.comm.all_gather(self._run.more_logits(token_rows))[:, : self.arch.vocab_size]

    def best_ids(self, batch: Any, kv: Any) -> NDArray[np.int64]:
        """As `forward`, but the ids [S] of the largest logits, the lowest of equals; FloatingPointError on NaN.

        For a single rank: with several, each knows the logits of its part of the vocabulary only.
        """
        return self._run.best_ids(batch, kv)

    @torch.inference_mode()
    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, hidden] float32, after the final norm, of R flat tokens of the batch that was run last.

        The same on every rank, which exchange nothing for it. Good until the next forward.
        """
        return self._run.hidden_states(token_rows)

    def _layers_of(self, batch: ForwardBatch, kv: Any) -> tuple[Array, Array]:
        """What the last layer gives, and the residual that it is yet to be added to."""
        backend, eps = self.backend, self.arch.rms_norm_eps
        residual = self._embed(batch)
        x = backend.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x, residual = backend.add_rms_norm(x, residual, layer.attention_norm, eps)
            q = backend.rope_and_write(backend.linear(x, layer.qkv), self._shard.heads.count, kv, index, batch)
            x = backend.attention(q, kv, index, batch, layer.window)
            x = self._sum_over_ranks(backend.linear(x, layer.output))
            x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = backend.gated_linear(x, layer.gate_up, self.arch.hidden_act)
            x = self._sum_over_ranks(backend.linear(x, layer.down))
        return x, residual

    def _final_states(self, parts: tuple[Array, Array], batch: ForwardBatch) -> Array:
        x, residual = (self.backend.select_logits_rows(part, batch) for part in parts)
        x, _ = self.backend.add_rms_norm(x, residual, self._norm, self.arch.rms_norm_eps)
        return x

    def _local_logits(self, states: Array) -> Array:
        """Of this rank's part of the vocabulary."""
        return self.backend.logits(states, self._head)

    def _embed(self, batch: ForwardBatch) -> Array:
        rows = self.backend.embed(self._embedding, batch, self._shard.vocab.start)
        return self._sum_over_ranks(rows)

    def _sum_over_ranks(self, x: Array) -> Array:
        return x if self.comm.size == 1 else self.backend.all_reduce(x, self.comm)


def check_tensor_parallel(arch: ModelArch, size: int) -> None:
    """StartError, with the values that would do, when `arch` has not a part for each of `size` ranks."""
    if size > most_ranks(arch):
        raise StartError(
            f"--tp {size} is more than this model's {arch.num_heads} attention heads, or the {arch.intermediate_size} "
            f"columns of its MLP; valid values: 1 to {most_ranks(arch)}."
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
