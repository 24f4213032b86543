"""What a rank takes on its GPU, counted before anything is allocated.

The sizes of weights, KV and buffers are those of the tensors that the GPU backend allocates; what CUDA takes for
itself and for graphs are estimates. All sizes are in bytes. They hold for Triton kernels under the interpreter, too,
whose tensors lie in the machine's memory.
"""

from msgspec import Struct

from config.graphs import graph_buckets
from config.memory_plan import DTYPE_BYTES, KEPT_BYTES, parameters
from config.schema import ModelArch, ModelConfig, WeightFormat

# A CUDA context, the parts of cuBLAS and torch that a model makes the driver load, cuBLAS's workspaces, Triton's
# kernels, and what torch's allocator keeps in hand. An estimate: it differs with devices and versions.
CUDA_RUNTIME = 768 << 20

# Resident size of a rank that has loaded torch for CUDA and its libraries; an estimate.
GPU_RANK_RUNTIME = 1536 << 20

# Estimates for CUDA graphs: kernels of a layer and outside the layers, and what the driver keeps for each of them.
_KERNELS_OF_LAYER = 10
_OTHER_KERNELS = 10
_KERNEL_NODE = 4 << 10

# Decode attention divides a context into parts of so many tokens, but makes no more than so many of them.
SPLIT_TOKENS = 512
MAX_SPLITS = 32

_SCORED_ROWS = 48  # whose logits are computed at once for log-probabilities of prompts
_INDEX_BYTES = 40  # of a token in the arrays that say what a step computes: its id, position, slot, sequence
_SAMPLING_BYTES = 128  # of a sequence: its sampling settings, and what is sampled


class GpuBuffers(Struct, frozen=True, kw_only=True):
    """What lies beside weights, KV and graphs from the start, for the largest step."""

    tokens: int  # states of all tokens of a step
    logits: int
    attention: int  # partial results of decode attention
    tables: int  # block tables, positions' rotations, and the index arrays of a step

    @property
    def total(self) -> int:
        return self.tokens + self.logits + self.attention + self.tables

    def named(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, getattr(self, name)) for name in self.__struct_fields__)


def gpu_weight_bytes(arch: ModelArch, model: ModelConfig, tp: int = 1) -> tuple[int, str]:
    """(bytes that one rank's weights take, in which formats matrices are held).

    Floats, the embedding, norms and biases in `model.dtype`, which is settled. Integers of the other matrices as they
    are, unless `model.quantization` is "none": 4 or 8 bits, and of 32 inputs a scale and, with 4 bits, a minimum, of
    16 bits each. A tied head is the embedding itself.
    """
    parts = parameters(arch, tp)
    matrices = parts.column_parallel + parts.row_parallel
    counts = arch.formats.layers or {"bfloat16": matrices}
    held: dict[str, float] = {model.dtype: parts.embedding}
    for weight_format, elements in (
        *((name, count / sum(counts.values()) * matrices) for name, count in counts.items()),
        (arch.formats.head, parts.head),
    ):
        kept = _kept_format(weight_format, model)
        held[kept] = held.get(kept, 0) + elements
    total = sum(elements * KEPT_BYTES[kept] for kept, elements in held.items())
    total += DTYPE_BYTES[model.dtype] * (parts.column_biases + parts.row_biases + parts.norms)
    return round(total), f"matrices are held as {', '.join(sorted(held))}"


def _kept_format(weight_format: WeightFormat, model: ModelConfig) -> str:
    is_kept = weight_format in ("int4", "int8") and model.quantization == "auto"
    return weight_format if is_kept else model.dtype


def token_width(arch: ModelArch, tp: int = 1) -> int:
    """Elements, in the compute dtype, that buffers hold for each token of a step.

    The residual, the normed input and a linear's result; q, k and v; attention's result; gate, up and their product.
    """
    heads, kv_heads, inner = arch.num_heads // tp, arch.num_kv_heads // tp, arch.intermediate_size // tp
    return 3 * arch.hidden_size + (2 * heads + 2 * kv_heads) * arch.head_dim + 3 * inner


def gpu_buffers(
    arch: ModelArch, dtype: str, max_step_tokens: int, max_seqs: int, max_model_len: int, block_size: int, tp: int = 1
) -> GpuBuffers:
    """For steps of `max_step_tokens` tokens of `max_seqs` sequences, none of them longer than `max_model_len`."""
    rows = max(max_seqs, min(_SCORED_ROWS, max_step_tokens))
    splits = min(MAX_SPLITS, -(-max_model_len // SPLIT_TOKENS))
    rotations = max_model_len * arch.head_dim * 4
    block_tables = max_seqs * -(-max_model_len // block_size) * 4
    indices = max_step_tokens * _INDEX_BYTES + max_seqs * _SAMPLING_BYTES
    return GpuBuffers(
        tokens=max_step_tokens * token_width(arch, tp) * DTYPE_BYTES[dtype],
        logits=2 * rows * arch.vocab_size * 4,
        attention=max_seqs * arch.num_heads // tp * splits * (arch.head_dim + 2) * 4,
        tables=rotations + block_tables + indices,
    )


def graph_bytes(arch: ModelArch, dtype: str, max_graph_seqs: int, tp: int = 1) -> int:
    """Estimate of what the graphs of all batches up to `max_graph_seqs` take.

    The driver keeps something for each kernel of each graph; results on the way lie in one pool, for the largest.
    """
    kernels = _KERNELS_OF_LAYER * arch.num_layers + _OTHER_KERNELS
    nodes = len(graph_buckets(max_graph_seqs)) * kernels * _KERNEL_NODE
    return nodes + max_graph_seqs * token_width(arch, tp) * DTYPE_BYTES[dtype]
