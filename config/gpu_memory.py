"""What a rank takes on its GPU, counted before anything is allocated.

Weights and KV are exact for the tensors that the GPU backend allocates. Buffers are those of the largest step there can
be. What CUDA takes for itself and for graphs are estimates. All sizes are in bytes. They hold for Triton kernels under
the interpreter, too, whose tensors lie in the machine's memory.
"""

from collections.abc import Iterator

from msgspec import Struct

from config.graphs import graph_buckets, graph_contexts
from config.memory_plan import DTYPE_BYTES, parameters
from config.schema import ModelArch, ModelConfig, WeightFormat, WeightFormats
from config.shards import largest
from config.weight_formats import as_loaded

# A CUDA context, the parts of cuBLAS and torch that a model makes the driver load, cuBLAS's workspaces, Triton's
# kernels, and what torch's allocator keeps in hand. An estimate: it differs with devices and versions.
CUDA_RUNTIME = 768 << 20

# Resident size of a rank that has loaded torch for CUDA and its libraries; an estimate.
GPU_RANK_RUNTIME = 1536 << 20

# Estimates for CUDA graphs: kernels of a layer and outside the layers, and what the driver keeps for each of them.
_KERNELS_OF_LAYER = 10
_OTHER_KERNELS = 10
_KERNEL_NODE = 4 << 10

# Integer weights are packed in blocks of 16 rows and of so many inputs, with scales and minimums of 16 bits for the
# largest of these groups in which they are equal, or for whole rows (`kernels.gpu.pack`).
_BLOCK_ROWS = 16
_BLOCK_INPUTS = {4: 128, 8: 64}
_GROUPS = (128, 64, 32)
_BITS = {"int4": 4, "int8": 8}

# Decode attention divides contexts into splits of so many bytes of keys (`kernels.gpu.decode_attention`).
_SPLIT_BYTES = 1 << 16
PREFILL_PARTIAL_BYTES = 64 << 20  # at most, as `kernels.gpu.prefill_attention` says
_SPLITS_OF_HEADS, _LEAST_SPLITS, _MOST_SPLITS = 512, 16, 128

_SCORED_ROWS = 48  # whose logits are computed at once for log-probabilities of prompts
_INDEX_BYTES = 64  # of a token in the arrays that say what a step computes: its id, position, slot, row
# What the sampling kernels tell each other (`kernels.gpu.block_statistics`): of a row, and of each block of its logits.
_SAMPLING_BYTES = (32 << 10) + 8
_LOGITS_BLOCK, _LOGITS_BLOCK_BYTES = 128, 16


class GpuBuffers(Struct, frozen=True, kw_only=True):
    """What is needed beside weights, KV and graphs for the largest step."""

    tokens: int  # states of all tokens
    logits: int
    attention: int  # partial results
    tables: int  # block tables, positions' rotations, and the arrays that say what is computed

    @property
    def total(self) -> int:
        return self.tokens + self.logits + self.attention + self.tables

    def named(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, getattr(self, name)) for name in self.__struct_fields__)


# --- weights ---------------------------------------------------------------------------------------------------------


def gpu_weight_bytes(arch: ModelArch, model: ModelConfig, tp: int = 1) -> tuple[int, str]:
    """(bytes that one rank's weights take, in which formats matrices are held).

    Floats, the embedding, norms and biases are in `model.dtype`, which is settled; integers of other matrices stay what
    they are, unless `model.quantization` is "none". A tied head is the embedding itself.
    """
    parts = parameters(arch, tp)
    matrices = list(_layer_matrices(arch, tp))
    formats = as_loaded(arch, model.quantization, tp)
    counts = formats.layers or {"bfloat16": 1}
    held: set[str] = {model.dtype}
    total = float(DTYPE_BYTES[model.dtype] * (parts.embedding + parts.column_biases + parts.row_biases + parts.norms))
    for weight_format, count in counts.items():
        kept = _kept_format(weight_format, model)
        held.add(kept)
        size = sum(_matrix_bytes(rows, inputs, kept, formats) for rows, inputs in matrices)
        total += arch.num_layers * size * count / sum(counts.values())
    if parts.head:
        kept = _kept_format(formats.head, model)
        held.add(kept)
        total += _matrix_bytes(parts.head // arch.hidden_size, arch.hidden_size, kept, formats)
    return round(total), f"matrices are held as {', '.join(sorted(held))}"


def _layer_matrices(arch: ModelArch, tp: int) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of one layer's matrices, as they are merged: q, k and v are one, and gate and up."""
    part = largest(arch, tp)
    queries, keys = part.heads.count * arch.head_dim, part.kv_heads.count * arch.head_dim
    inner = part.mlp.count
    yield queries + 2 * keys, arch.hidden_size
    yield arch.hidden_size, queries
    yield 2 * inner, arch.hidden_size
    yield arch.hidden_size, inner


def _kept_format(weight_format: WeightFormat, model: ModelConfig) -> str:
    is_kept = weight_format in _BITS and model.quantization != "none"
    return weight_format if is_kept else model.dtype


def _matrix_bytes(rows: int, inputs: int, kept: str, formats: WeightFormats) -> int:
    if kept not in _BITS:
        return rows * inputs * DTYPE_BYTES[kept]
    bits = _BITS[kept]
    rows = _round_up(rows, _BLOCK_ROWS)
    packed_inputs = _round_up(inputs, _BLOCK_INPUTS[bits])
    group = packed_inputs
    if formats.group < inputs:
        group = next(size for size in _GROUPS if formats.group % size == 0)
    groups = -(-packed_inputs // group)
    # Where a block of inputs has one group, a scale always has room for a minimum beside it.
    has_scale_alone = formats.group < inputs and group < _BLOCK_INPUTS[bits] and (bits == 8 or not formats.has_minimums)
    numbers = 1 if has_scale_alone else 2
    return rows * (packed_inputs * bits // 8 + groups * numbers * 2)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# --- buffers and graphs ----------------------------------------------------------------------------------------------


def token_width(arch: ModelArch, tp: int = 1) -> int:
    """Elements, in the compute dtype, that are held for each token of a step.

    The residual, the normed input and a linear's result; q, k and v; attention's result; gate, up and their product.
    """
    part = largest(arch, tp)
    heads = part.heads.count + part.kv_heads.count
    return 3 * arch.hidden_size + 2 * heads * arch.head_dim + 3 * part.mlp.count


def gpu_buffers(
    arch: ModelArch,
    dtype: str,
    kv_dtype: str,
    max_step_tokens: int,
    max_seqs: int,
    max_model_len: int,
    block_size: int,
    tp: int = 1,
) -> GpuBuffers:
    """For steps of `max_step_tokens` tokens of `max_seqs` sequences, none of them longer than `max_model_len`."""
    rows = max(max_seqs, min(_SCORED_ROWS, max_step_tokens))
    rotations = max_model_len * arch.head_dim * 4
    block_tables = max_seqs * -(-max_model_len // block_size) * 4
    decodes = max_seqs * _attention_bytes(arch, kv_dtype, max_model_len, tp)
    return GpuBuffers(
        tokens=max_step_tokens * token_width(arch, tp) * DTYPE_BYTES[dtype],
        # As they are, and those whose values are told.
        logits=rows * (2 * arch.vocab_size * 4 + sampling_bytes(arch.vocab_size)),
        attention=max(decodes, PREFILL_PARTIAL_BYTES) if decodes else 0,
        tables=rotations + 2 * block_tables + max_step_tokens * _INDEX_BYTES,  # of all rows, and of a step's
    )


def sampling_bytes(vocab_size: int) -> int:
    """Of a row that is sampled, beside its logits."""
    return _SAMPLING_BYTES + -(-vocab_size // _LOGITS_BLOCK) * _LOGITS_BLOCK_BYTES


def _attention_bytes(arch: ModelArch, kv_dtype: str, max_model_len: int, tp: int) -> int:
    """Of a decoding sequence: from each split and head a float32 vector, its largest score and its sum."""
    width = 1 << (arch.head_dim - 1).bit_length()
    shortest = _SPLIT_BYTES // (width * DTYPE_BYTES.get(kv_dtype, 1))
    part = largest(arch, tp)
    most = min(max(_SPLITS_OF_HEADS // part.kv_heads.count, _LEAST_SPLITS), _MOST_SPLITS)
    splits = min(-(-max_model_len // shortest), most)
    return part.heads.count * splits * (arch.head_dim + 2) * 4 if splits > 1 else 0


def graph_bytes(
    arch: ModelArch,
    dtype: str,
    kv_dtype: str,
    max_graph_seqs: int,
    max_model_len: int,
    block_size: int,
    tp: int = 1,
) -> int:
    """Estimate of what the graphs of all decode batches of up to `max_graph_seqs` sequences take.

    The driver keeps something for each kernel of each graph; what is on the way lies in one pool for all of them.
    """
    if not max_graph_seqs:
        return 0
    graphs = len(graph_buckets(max_graph_seqs)) * len(graph_contexts(max_model_len))
    kernels = _KERNELS_OF_LAYER * arch.num_layers + _OTHER_KERNELS
    pool = gpu_buffers(arch, dtype, kv_dtype, max_graph_seqs, max_graph_seqs, max_model_len, block_size, tp)
    return graphs * kernels * _KERNEL_NODE + pool.tokens + pool.logits + pool.attention
