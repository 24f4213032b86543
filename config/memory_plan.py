"""What a model takes in memory, counted before anything is allocated.

All sizes are in bytes. Weights and KV are exact for the shapes in `ModelArch`; activations and what the processes
themselves take are estimates, and said to be.
"""

from typing import Annotated

from msgspec import Meta, Struct

from config.bytesize import format_size
from config.schema import Config, ModelArch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Resident size of a rank with torch loaded and no model, and of each other process; measured with torch 2.13 for CPUs.
RANK_RUNTIME = 350 << 20
PROCESS_RUNTIME = 70 << 20

# Largest tile of keys for which attention scores are held at once.
_ATTENTION_TILE = 512

_DEVICE_SIZES = (8 << 30, 16 << 30, 24 << 30, 40 << 30, 80 << 30, 141 << 30)
_DEVICE_SHARE = 0.9  # of a device's memory that a rank may plan with


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes by purpose; per rank unless the name says otherwise."""

    tp: int
    weights: int
    activations: int
    runtime_total: int  # all processes of the engine together, without model and KV
    kv_bytes_per_token: Annotated[int, Meta(description="of one rank")]
    block_size: int
    num_blocks: int
    memory_available: int  # of the machine, when the plan was made
    weight_note: str = ""

    @property
    def kv(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def kv_tokens(self) -> int:
        """Token positions that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def total(self) -> int:
        """All ranks and processes together: on a CPU they share one memory."""
        return self.tp * (self.weights + self.activations + self.kv) + self.runtime_total

    @property
    def fits(self) -> bool:
        return self.total <= self.memory_available


def parameter_count(arch: ModelArch, tp: int = 1) -> int:
    """Parameters that one of `tp` ranks holds: matrices are split, norms and row-parallel biases are not.

    The embedding and an untied head are split by vocabulary rows; KV heads fewer than ranks are held by several.
    """
    hidden, dim = arch.hidden_size, arch.head_dim
    queries = arch.num_heads // tp * dim
    keys = kv_heads_per_rank(arch, tp) * dim
    inner = arch.intermediate_size // tp
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner + 2 * hidden
    if arch.qkv_bias:
        layer += queries + 2 * keys
    if arch.o_bias:
        layer += hidden
    if arch.mlp_bias:
        layer += 2 * inner + hidden
    tables = 1 if arch.tie_embeddings else 2
    return arch.num_layers * layer + tables * -(-arch.vocab_size // tp) * hidden + hidden


def kv_heads_per_rank(arch: ModelArch, tp: int) -> int:
    """KV heads of each rank; a head is held by several ranks when there are more ranks than heads."""
    return max(1, arch.num_kv_heads // tp)


def kv_bytes_per_token(arch: ModelArch, dtype: str, tp: int = 1) -> int:
    """Keys and values of one token position in all layers, on one rank."""
    return 2 * arch.num_layers * kv_heads_per_rank(arch, tp) * arch.head_dim * DTYPE_BYTES[dtype]


def activation_bytes(arch: ModelArch, dtype: str, max_step_tokens: int, max_seqs: int, tp: int = 1) -> int:
    """Estimate of what one step of `max_step_tokens` tokens needs beside weights and KV.

    The widest moment of a layer (residual, normed input, q, k, v or gate and up), attention scores of one key tile in
    float32, and the float32 logits of all sampling rows twice: as computed and as the sampler's copy.
    """
    size = DTYPE_BYTES[dtype]
    heads = arch.num_heads // tp
    attention = (heads + 2 * kv_heads_per_rank(arch, tp)) * arch.head_dim
    mlp = 3 * arch.intermediate_size // tp
    layer = max_step_tokens * (3 * arch.hidden_size + max(attention, mlp)) * size
    scores = max_step_tokens * heads * _ATTENTION_TILE * 4
    logits = 2 * min(max_seqs, max_step_tokens) * arch.vocab_size * 4
    return layer + scores + logits


def weight_dtype(dtype: str, has_bfloat16: bool) -> tuple[str, str]:
    """(number type the CPU backend holds weights in, why it differs from the compute type or "")."""
    if dtype == "bfloat16" and not has_bfloat16:
        return "float32", "this CPU has no bfloat16 instructions, so weights are held as float32"
    return dtype, ""


def can_split(arch: ModelArch, tp: int) -> bool:
    """Whether heads and MLP divide among `tp` ranks."""
    kv = arch.num_kv_heads
    return arch.num_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and arch.intermediate_size % tp == 0


def smallest_tp(config: Config, arch: ModelArch, device_bytes: int) -> int | None:
    """Fewest ranks, of `device_bytes` each, that hold the model in its dtype and the KV of one longest sequence."""
    dtype, length = config.model.dtype, config.model.max_model_len or arch.max_position
    step = config.scheduler.max_step_tokens or 512
    for tp in range(1, 65):
        if can_split(arch, tp):
            need = parameter_count(arch, tp) * DTYPE_BYTES[dtype] + length * kv_bytes_per_token(arch, dtype, tp)
            need += activation_bytes(arch, dtype, step, config.scheduler.max_seqs, tp)
            if need + RANK_RUNTIME <= device_bytes * _DEVICE_SHARE:
                return tp
    return None


def _context_lengths(longest: int) -> list[int]:
    lengths = [512]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return [length for length in lengths if length < longest] + [longest]


def short_report(plan: MemoryPlan) -> str:
    """One line for the start of the server."""
    ranks = f" x {plan.tp} ranks" if plan.tp > 1 else ""
    return (
        f"memory: weights {format_size(plan.weights)}, KV {format_size(plan.kv)} "
        f"({plan.num_blocks} blocks, {plan.kv_tokens} tokens), activations about {format_size(plan.activations)}"
        f"{ranks}; {format_size(plan.total)} of {format_size(plan.memory_available)} available"
    )


def full_report(plan: MemoryPlan, config: Config, arch: ModelArch) -> str:
    """The page that `--plan` prints."""
    rank = " of each rank" if plan.tp > 1 else ""
    note = f"; {plan.weight_note}" if plan.weight_note else ""
    longest = config.model.max_model_len or arch.max_position
    lines = [
        f"model        {arch.family}, {parameter_count(arch) / 1e6:,.1f} M parameters, {arch.num_layers} layers, "
        f"{arch.num_heads} heads ({arch.num_kv_heads} KV) of {arch.head_dim}",
        f"computes in  {config.model.dtype} on {config.worker.device}, tp {plan.tp}",
        "",
        f"weights      {format_size(plan.weights):>10}{rank} (files: {format_size(arch.weight_bytes)}{note})",
        f"activations  {format_size(plan.activations):>10}{rank} "
        f"(estimate, {config.scheduler.max_step_tokens} tokens a step)",
        f"KV cache     {format_size(plan.kv):>10}{rank} ({plan.num_blocks} blocks of {plan.block_size} tokens, "
        f"{format_size(plan.kv_bytes_per_token)} a token)",
        f"processes    {format_size(plan.runtime_total):>10} (estimate)",
        f"total        {format_size(plan.total):>10} of {format_size(plan.memory_available)} available",
        "",
        f"max concurrent tokens {plan.kv_tokens:,}",
        "sequences that fit at once, by their length (running at once: at most --max-seqs "
        f"{config.scheduler.max_seqs})",
    ]
    for length in _context_lengths(longest):
        blocks = -(-length // plan.block_size)
        lines.append(f"  {length:>9,} tokens  {plan.num_blocks // blocks:>7,}")
    lines += ["", "smallest tp that holds the model and one longest sequence, by memory of each device"]
    for size in _DEVICE_SIZES:
        tp = smallest_tp(config, arch, size)
        lines.append(f"  {format_size(size):>9}  {'does not fit' if tp is None else f'tp {tp}'}")
    lines += [
        f"here: tp {plan.tp} {'fits' if plan.fits else 'does not fit'} (on a CPU all ranks share this memory)",
        f"copies of the whole engine (dp) that this memory holds: {plan.memory_available // plan.total}",
    ]
    return "\n".join(lines)


def shortage(plan: MemoryPlan, config: Config) -> str:
    """A paragraph that says why the plan does not fit and what to do."""
    without_kv = plan.total - plan.tp * plan.kv
    advice = []
    if without_kv < plan.memory_available:
        room = (plan.memory_available - without_kv) // plan.tp
        advice.append(f"--kv-memory {max(1, room >> 20)}MiB or less")
    else:
        if config.model.dtype == "float32":
            advice.append("--dtype bfloat16, where the CPU has bfloat16 instructions")
        advice.append("a smaller model")
    advice.append("a machine with more free memory")
    return (
        f"The model does not fit: weights take {format_size(plan.tp * plan.weights)}, activations about "
        f"{format_size(plan.tp * plan.activations)}, the KV cache {format_size(plan.tp * plan.kv)} and the processes "
        f"about {format_size(plan.runtime_total)}, together {format_size(plan.total)}, but only "
        f"{format_size(plan.memory_available)} is available. What helps: {', or '.join(advice)}."
    )
