"""What the launcher prints about a memory plan: a line at start, and the page of `--plan`."""

from config.bytesize import format_size
from config.graphs import graph_buckets, graph_contexts
from config.machine import Machine
from config.memory_plan import MemoryPlan, parameter_count, smallest_tp
from config.resolve import Resolved, resolve
from config.schema import Config, ModelArch
from config.sources import ConfigError

_GPU_ROW = "  {:>9}  {:>12}  {:>16}  {:>7}"
_DEVICE_SIZES = (8 << 30, 16 << 30, 24 << 30, 40 << 30, 80 << 30, 141 << 30)


def short_report(plan: MemoryPlan) -> str:
    """One line for the start of the server."""
    ranks = f" x {plan.tp} ranks" if plan.tp > 1 else ""
    host = f"host KV {format_size(plan.host_kv)} ({plan.num_host_blocks} blocks), " if plan.num_host_blocks else ""
    kv = f"KV {format_size(plan.kv)} ({plan.num_blocks} blocks, {plan.kv_tokens} tokens), "
    if plan.gpu is None:
        return (
            f"memory: weights {format_size(plan.weights)}, {kv}{host}activations about "
            f"{format_size(plan.activations)}{ranks}; {format_size(plan.total)} of "
            f"{format_size(plan.memory_available)} available"
        )
    return (
        f"GPU memory: weights {format_size(plan.weights)}, {kv}step buffers {format_size(plan.activations)}, "
        f"CUDA graphs about {format_size(plan.gpu.graphs)}, CUDA itself about {format_size(plan.gpu.runtime)}; "
        f"{format_size(plan.gpu_total)} of {format_size(plan.gpu.usable)} that may be used; machine: {host}about "
        f"{format_size(plan.total)} of {format_size(plan.memory_available)} available"
    )


def full_report(asked: Config, arch: ModelArch, machine: Machine, resolved: Resolved) -> str:
    """The page that `--plan` prints of `resolved`, made of the others by `resolve`."""
    plan, config = resolved.plan, resolved.config
    others = _other_gpus(asked, arch, machine) if plan.gpu else _other_degrees(plan, config, arch)
    lines = [
        f"model        {arch.family}, {parameter_count(arch) / 1e6:,.1f} M parameters, {arch.num_layers} layers, "
        f"{arch.num_heads} heads ({arch.num_kv_heads} KV) of {arch.head_dim}",
        f"computes in  {config.model.dtype} on {config.worker.device}, tp {plan.tp}",
        *_memory(plan, config, arch),
        "",
        f"max concurrent tokens {plan.kv_tokens:,}",
        _at_once(plan, config),
        "sequences that fit at once, by their length (running at once: at most --max-seqs "
        f"{config.scheduler.max_seqs})",
    ]
    for length in _context_lengths(config.model.max_model_len or arch.max_position):
        blocks = -(-length // plan.block_size)
        lines.append(f"  {length:>9,} tokens  {plan.num_blocks // blocks:>7,}")
    return "\n".join([*lines, "", *others])


def _memory(plan: MemoryPlan, config: Config, arch: ModelArch) -> list[str]:
    rank = " of each rank" if plan.tp > 1 else ""
    files = f"files: {format_size(arch.weight_bytes)}" if arch.weight_bytes else "no files here: as config.json says"
    note = f"; {plan.weight_note}" if plan.weight_note else ""
    step = f"{config.scheduler.max_step_tokens} tokens a step"
    working, kind = ("buffers      ", "") if plan.buffers else ("activations  ", "estimate, ")
    parts = [f"  {name:<14}{format_size(size):>10}" for name, size in plan.buffers]
    host_kv = [f"host KV      {format_size(plan.host_kv):>10}{rank} ({plan.num_host_blocks} blocks)"]
    host_kv = host_kv if plan.num_host_blocks else []
    processes = f"processes    {format_size(plan.runtime_total):>10} (estimate)"
    own = [
        f"weights      {format_size(plan.weights):>10}{rank} ({files}{note})",
        f"{working}{format_size(plan.activations):>10}{rank} ({kind}{step})",
        *parts,
        f"KV cache     {format_size(plan.kv):>10}{rank} ({plan.num_blocks} blocks of {plan.block_size} tokens, "
        f"{format_size(plan.kv_bytes_per_token)} a token in {config.model.kv_dtype})",
    ]
    total = f"total        {format_size(plan.total):>10}"
    if plan.gpu is None:
        return ["", *own, *host_kv, processes, f"{total} of {format_size(plan.memory_available)} available"]
    sizes = len(graph_buckets(config.worker.max_graph_seqs or 0))
    contexts = len(graph_contexts(config.model.max_model_len or 1))
    graphs = f"{sizes} numbers of sequences up to {config.worker.max_graph_seqs}, {contexts} of tokens"
    graphs = graphs if sizes else "none"
    available = "" if plan.gpu.elsewhere else f" of {format_size(plan.memory_available)} available"
    return [
        "",
        f"GPU: {plan.gpu.name}",
        *own,
        f"CUDA graphs  {format_size(plan.gpu.graphs):>10} (estimate, {graphs})",
        f"CUDA itself  {format_size(plan.gpu.runtime):>10} (estimate)",
        f"total        {format_size(plan.gpu_total):>10} of {format_size(plan.gpu.usable)} that may be used, of "
        f"{format_size(plan.gpu.total)} (--gpu-memory-share {config.worker.gpu_memory_share:g})",
        "",
        "the machine's memory",
        *host_kv,
        processes,
        f"{total}{available}",
    ]


def _at_once(plan: MemoryPlan, config: Config) -> str:
    """What all the requests that may run together have."""
    seqs, longest = config.scheduler.max_seqs or 1, config.model.max_model_len or 1
    each, need = plan.num_blocks // seqs * plan.block_size, seqs * plan.bytes_of(longest)
    if need <= plan.kv:
        return f"all of --max-seqs {seqs} at once: {longest:,} tokens each"
    if not each:
        return (
            f"all of --max-seqs {seqs} at once: never, since each needs a block and the KV cache has "
            f"{plan.num_blocks}; lower --max-seqs, or give the KV cache more memory"
        )
    return (
        f"all of --max-seqs {seqs} at once: up to {each:,} tokens each; of {longest:,} each they would take "
        f"{format_size(need)}, {format_size(need - plan.kv)} more than the KV cache has"
    )


def _context_lengths(longest: int) -> list[int]:
    lengths = [512]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return [length for length in lengths if length < longest] + [longest]


def _other_degrees(plan: MemoryPlan, config: Config, arch: ModelArch) -> list[str]:
    lines = [
        f"smallest tp that holds the model and one sequence of {config.model.max_model_len:,} tokens, "
        "by memory of each device"
    ]
    for size in _DEVICE_SIZES:
        tp = smallest_tp(config, arch, size)
        lines.append(f"  {format_size(size):>9}  {'does not fit' if tp is None else f'tp {tp}'}")
    return [
        *lines,
        f"here: tp {plan.tp} {'fits' if plan.fits else 'does not fit'} (on a CPU all ranks share this memory)",
        f"copies of the whole engine (dp) that this memory holds: {plan.memory_available // plan.total}",
    ]


def _other_gpus(asked: Config, arch: ModelArch, machine: Machine) -> list[str]:
    """What would be chosen on GPUs of other sizes."""
    header = _GPU_ROW.format("memory", "in KV cache", "longest sequence", "step")
    lines = ["on GPUs of other sizes, with what would be chosen for each, in tokens", header]
    for size in _DEVICE_SIZES:
        lines.append(_on_gpu(asked, arch, machine.on(machine.gpus[0].sized(size))))
    return lines


def _on_gpu(asked: Config, arch: ModelArch, machine: Machine) -> str:
    size = format_size(machine.gpus[0].total_bytes)
    try:
        resolved = resolve(asked, arch, machine)
    except ConfigError as error:  # there, other settings are chosen than those that it goes with
        return f"  {size:>9}  {error}"
    if not resolved.plan.fits_gpu:
        return f"  {size:>9}  does not fit"
    lengths = resolved.config.model.max_model_len, resolved.config.scheduler.max_step_tokens
    return _GPU_ROW.format(size, *(f"{length:,}" for length in (resolved.plan.kv_tokens, *lengths)))
