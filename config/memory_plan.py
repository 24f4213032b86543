"""What a model takes in memory, counted before anything is allocated.

All sizes are in bytes. Weights and KV are exact for the shapes in `ModelArch`; activations on a CPU and what the
processes themselves take are estimates, and said to be. What is particular to GPUs is in `config.gpu_memory`.
"""

from msgspec import Struct

from config.schema import Config, ModelArch, ModelConfig, WeightFormat
from config.shards import can_split, largest
from config.weight_formats import as_loaded

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Of one weight in the matrices of the compiled CPU kernels; scales (and minimums) of 32 weights are float16, one for
# int8, two for int4.
_KEPT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 * 2 / 32}

# Resident size of a rank with torch loaded and no model, and of each other process; measured with torch 2.13 for CPUs.
RANK_RUNTIME = 350 << 20
PROCESS_RUNTIME = 70 << 20

# Largest tile of keys for which attention scores are held at once.
_ATTENTION_TILE = 512

_DEVICE_SHARE = 0.9  # of a device's memory that a rank may plan with


class GpuBudget(Struct, frozen=True, kw_only=True):
    """The GPU of a rank, and what it takes of it beside weights, activations and KV."""

    name: str
    total: int
    free: int
    usable: int  # the engine's share of `total`, or `free` if that is less
    graphs: int
    runtime: int  # of CUDA and the libraries
    elsewhere: bool = False  # it is no GPU of this machine, of whose own memory nothing is known then


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes by purpose; per rank unless the name says otherwise.

    With a GPU, weights, activations and KV cache lie there, and only the rest in the memory of the machine.
    """

    tp: int
    weights: int
    activations: int
    runtime_total: int  # all processes of the engine together, without model and KV
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    memory_available: int  # of the machine, when the plan was made
    weight_note: str = ""
    num_host_blocks: int = 0  # of the host tier
    gpu: GpuBudget | None = None
    buffers: tuple[tuple[str, int], ...] = ()  # what `activations` consists of, where that is known

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    def bytes_of(self, tokens: int) -> int:
        """KV of one sequence of `tokens` tokens, in whole blocks."""
        return -(-tokens // self.block_size) * self.block_bytes

    @property
    def kv(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def host_kv(self) -> int:
        return self.num_host_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Token positions that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def total(self) -> int:
        """Of the machine's memory, all ranks and processes together."""
        on_device = 0 if self.gpu else self.weights + self.activations + self.kv
        return self.tp * (on_device + self.host_kv) + self.runtime_total

    @property
    def gpu_total(self) -> int:
        """Of the GPU's memory; 0 without one."""
        if self.gpu is None:
            return 0
        return self.weights + self.activations + self.kv + self.gpu.graphs + self.gpu.runtime

    @property
    def fits_gpu(self) -> bool:
        return self.gpu is None or self.gpu_total <= self.gpu.usable

    @property
    def fits_host(self) -> bool:
        return self.total <= self.memory_available or (self.gpu is not None and self.gpu.elsewhere)

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host


class Parameters(Struct, frozen=True):
    """Parameters of one rank, by the way they are held."""

    embedding: int
    head: int  # 0 when tied: then it is the embedding
    column_parallel: int  # q, k, v, gate, up
    row_parallel: int  # o, down
    column_biases: int
    row_biases: int
    norms: int


def parameters(arch: ModelArch, tp: int) -> Parameters:
    """Matrices are split among `tp` ranks, the embedding and the head by vocabulary rows; norms are not split.

    Where something does not divide, of the rank that has most of it.
    """
    part = largest(arch, tp)
    hidden, inner = arch.hidden_size, part.mlp.count
    queries, keys = part.heads.count * arch.head_dim, part.kv_heads.count * arch.head_dim
    table = part.vocab_rows * hidden
    column = hidden * (queries + 2 * keys + 2 * inner)
    row = queries * hidden + inner * hidden
    column_biases = (queries + 2 * keys if arch.qkv_bias else 0) + (2 * inner if arch.mlp_bias else 0)
    row_biases = hidden * (arch.o_bias + arch.mlp_bias)
    return Parameters(
        embedding=table,
        head=0 if arch.tie_embeddings else table,
        column_parallel=arch.num_layers * column,
        row_parallel=arch.num_layers * row,
        column_biases=arch.num_layers * column_biases,
        row_biases=arch.num_layers * row_biases,
        norms=(2 * arch.num_layers + 1) * hidden,
    )


def parameter_count(arch: ModelArch, tp: int = 1) -> int:
    """Parameters that one of `tp` ranks holds; with one rank, those of the model."""
    parts = parameters(arch, tp)
    matrices = parts.embedding + parts.head + parts.column_parallel + parts.row_parallel
    return matrices + parts.column_biases + parts.row_biases + parts.norms


def weight_bytes(
    arch: ModelArch, model: ModelConfig, native_kernels: bool, has_bfloat16: bool, tp: int = 1
) -> tuple[int, str]:
    """(bytes that one rank's weights take with a CPU's kernels, what is worth knowing about that or "").

    `model.dtype` is settled; `has_bfloat16`: the CPU has instructions for it.
    """
    if native_kernels:
        return _native_weight_bytes(arch, model, tp)
    return _torch_weight_bytes(arch, model.dtype, has_bfloat16, tp)


def _native_weight_bytes(arch: ModelArch, model: ModelConfig, tp: int) -> tuple[int, str]:
    """With compiled kernels: matrices in the formats they have in the checkpoint; norms and biases in float32.

    The embedding is a matrix like any other: rows are dequantized as they are needed. A tied one is also the head.
    """
    parts = parameters(arch, tp)
    matrices = parts.column_parallel + parts.row_parallel
    formats = as_loaded(arch, model.quantization, tp)
    counts = formats.layers or {"bfloat16": matrices}
    # Of the rank that has most. Formats are taken to be spread over all matrices evenly: in a mixed file, of which some
    # matrices are divided less evenly than others, ranks' shares of a format differ from that.
    held: dict[WeightFormat, float] = {}
    for weight_format, elements in (
        *((name, count / sum(counts.values()) * matrices) for name, count in counts.items()),
        (formats.embedding, parts.embedding),
        (formats.head, parts.head),
    ):
        kept = _kept_format(weight_format, model)
        held[kept] = held.get(kept, 0) + elements
    total = sum(elements * _KEPT_BYTES[kept] for kept, elements in held.items())
    total += 4 * (parts.column_biases + parts.row_biases + parts.norms)
    return round(total), f"matrices are held as {', '.join(sorted(kept for kept in held if held[kept]))}"


def _kept_format(weight_format: WeightFormat, model: ModelConfig) -> WeightFormat:
    """The format in which the compiled kernels hold a matrix that is loaded as `weight_format`."""
    if weight_format in ("int4", "int8"):
        return "bfloat16" if model.quantization == "none" else weight_format
    return "bfloat16" if "bfloat16" in (weight_format, model.dtype) else "float32"


def _torch_weight_bytes(arch: ModelArch, dtype: str, has_bfloat16: bool, tp: int) -> tuple[int, str]:
    """With plain torch operations.

    The backend multiplies in float32 unless the CPU has bfloat16 instructions, and keeps matrices as it multiplies
    them. The head gives float32 logits, so it is always held as float32, in a copy of its own even when it is tied to
    the embedding; so are, with several ranks, the matrices whose results are summed over ranks.
    """
    parts = parameters(arch, tp)
    own = DTYPE_BYTES[dtype]
    matrix = 2 if dtype == "bfloat16" and has_bfloat16 else 4
    head = 4 * (parts.head or parts.embedding)
    column = matrix * (parts.column_parallel + parts.column_biases)
    row = (matrix if tp == 1 else 4) * (parts.row_parallel + parts.row_biases)
    total = own * (parts.embedding + parts.norms) + head + column + row
    notes = []
    if matrix != own:
        notes.append(f"matrices are held as float32: this CPU multiplies no {dtype}")
    if arch.tie_embeddings:
        notes.append("the tied head is held apart from the embedding")
    return total, "; ".join(notes)


def kv_bytes_per_token(arch: ModelArch, dtype: str, tp: int = 1, native_block_size: int = 0) -> int:
    """Keys and values of one token position in all layers, on one rank; each of 8 bits has a float32 scale.

    The compiled kernels fill up blocks and heads to eights, and a layer's part of a block to 64 bytes: with
    `native_block_size`, each position has its share of that, rounded up.
    """
    heads = largest(arch, tp).kv_heads.count
    if not native_block_size:
        key = arch.head_dim + 4 if dtype in ("int8", "fp8") else arch.head_dim * DTYPE_BYTES[dtype]
        return 2 * arch.num_layers * heads * key
    keys, width = _round_up(native_block_size, 8), _round_up(arch.head_dim, 8)
    elements = arch.head_dim * keys + native_block_size * width
    head = elements + 2 * keys * 4 if dtype == "int8" else elements * DTYPE_BYTES[dtype]
    return -(-arch.num_layers * _round_up(heads * head, 64) // native_block_size)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def activation_bytes(arch: ModelArch, dtype: str, max_step_tokens: int, max_seqs: int, tp: int = 1) -> int:
    """Estimate of what one step of `max_step_tokens` tokens needs beside weights and KV.

    The widest moment of a layer (residual, normed input, q, k, v or gate and up), attention scores of one key tile in
    float32, and the float32 logits of all sampling rows twice: as computed and as the sampler's copy.
    """
    size = DTYPE_BYTES[dtype]
    part = largest(arch, tp)
    heads = part.heads.count
    attention = (heads + 2 * part.kv_heads.count) * arch.head_dim
    mlp = 3 * part.mlp.count
    layer = max_step_tokens * (3 * arch.hidden_size + max(attention, mlp)) * size
    scores = max_step_tokens * heads * _ATTENTION_TILE * 4
    logits = 2 * min(max_seqs, max_step_tokens) * arch.vocab_size * 4
    return layer + scores + logits


def smallest_tp(config: Config, arch: ModelArch, device_bytes: int) -> int | None:
    """Fewest ranks, of `device_bytes` each, that hold the model and the KV of one longest sequence.

    Both dtypes of `config.model` are settled. Weights are as compiled kernels hold them, or all in the dtype of the
    model with plain torch operations.
    """
    dtype, kv_dtype = config.model.dtype, config.model.kv_dtype
    length = config.model.max_model_len or arch.max_position
    step = config.scheduler.max_step_tokens or 512
    for tp in range(1, 65):
        if can_split(arch, tp):
            if config.worker.kernels == "torch":
                weights = parameter_count(arch, tp) * DTYPE_BYTES[dtype]
            else:
                weights, _ = _native_weight_bytes(arch, config.model, tp)
            need = weights + length * kv_bytes_per_token(arch, kv_dtype, tp)
            need += activation_bytes(arch, dtype, step, config.scheduler.max_seqs or 1, tp)
            if need + RANK_RUNTIME <= device_bytes * _DEVICE_SHARE:
                return tp
    return None
