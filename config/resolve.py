"""From what the user asked for to what will run: fills in every setting left open, and says why.

Pure: all that is known of the machine comes in as `Machine`, gathered by `launch.machine`. What depends on the device
alone is in `config.device_choices`.
"""

from typing import get_args

import msgspec
from msgspec import Struct

from config import device_choices, gpu_memory, memory_plan
from config.bytesize import format_size, parse_size
from config.machine import Machine
from config.memory_plan import GpuBudget, MemoryPlan
from config.schema import Config, ModelArch, PoolingName
from config.shards import can_split, most_ranks
from config.sources import ConfigError

# What the server passes to chat templates, with `tokenizer_proc.template_child`.
_TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

_KV_SHARE = 0.25  # of the memory available to a CPU, at most, when --kv-memory is not given
_KV_CAP = 4 << 30
_MAX_SEQS = {"cpu": 64, "cuda": 256}
_STEP_TOKENS = 512  # on a CPU; on a GPU at least
_WHY_STEP_TOKENS = {
    "cpu": "a CPU gains little from longer steps",
    "cuda": "by the GPU's memory; fewer make streams wait less for prompts, more make prompts faster",
}
_USEFUL_TOKENS = 512  # a KV cache for fewer is no server: then the plan is one that does not fit

# Tokens of a step on GPUs of at least so many bytes: those with more memory are the faster ones.
_GPU_STEP_TOKENS = ((60 << 30, 8192), (30 << 30, 4096), (0, 2048))
_GPU_STEP_SHARE = 0.1  # of what the weights leave, at most, for the buffers of a step


class Resolved(Struct, frozen=True, kw_only=True):
    """A configuration in which nothing is left open, and how it came about."""

    config: Config
    plan: MemoryPlan
    reasons: tuple[str, ...]
    rank_cpus: tuple[tuple[int, ...], ...] = ()  # of each rank's compute threads; empty: they are bound to none


def resolve(config: Config, arch: ModelArch, machine: Machine) -> Resolved:
    """Choose what was left open; ConfigError when what was asked for is impossible.

    A plan that does not fit into memory is no error here: see `MemoryPlan.fits`.
    """
    reasons: list[str] = []
    _check(config)
    device = device_choices.device(config, arch, machine, reasons)
    kernels = device_choices.kernels(config, arch, device, machine, reasons)
    device_choices.check_quantization(config, kernels)
    dtype = device_choices.dtype(config, device, kernels, machine, reasons)
    kv_dtype = device_choices.kv_dtype(config, dtype, kernels, machine, reasons)
    pooling = _pooling(config, arch, reasons)
    tp = config.worker.tp
    if not can_split(arch, tp):
        raise ConfigError(
            f"--tp {tp}: the model's {arch.num_heads} heads and MLP of {arch.intermediate_size} columns are too few "
            f"for {tp} ranks; possible: 1 to {most_ranks(arch)}"
        )
    threads = device_choices.threads(config, device, machine, reasons)
    rank_cpus = device_choices.rank_cpus(config, threads, kernels, machine, reasons)
    deterministic = device_choices.deterministic(config, device, reasons)
    asked_len = config.model.max_model_len
    if asked_len is not None and asked_len > arch.max_position:
        raise ConfigError(f"--max-model-len {asked_len}: the model was made for at most {arch.max_position} positions")
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, dtype=dtype, kv_dtype=kv_dtype, pooling=pooling),
        worker=msgspec.structs.replace(
            config.worker, device=device, kernels=kernels, threads=threads, deterministic=deterministic
        ),
    )
    config = _settle_batches(config, arch, machine, reasons)
    longest = asked_len or _longest(config, arch, machine)
    draft = _draft(config, arch, machine, longest)
    asked_host = _asked_host_memory(config, draft)
    draft = msgspec.structs.replace(draft, num_host_blocks=(asked_host or 0) // draft.block_bytes)
    kv_memory = _kv_memory(config, draft, arch, reasons)
    plan = msgspec.structs.replace(draft, num_blocks=kv_memory // draft.block_bytes)
    host_memory = _default_host_memory(config, plan, reasons) if asked_host is None else asked_host
    max_model_len = _max_model_len(config, arch, plan, longest, reasons)
    # Buffers that grow with the longest sequence are those of the one there will be.
    plan = msgspec.structs.replace(
        _draft(config, arch, machine, max_model_len),
        num_blocks=plan.num_blocks,
        num_host_blocks=host_memory // plan.block_bytes,
    )
    resolved = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, max_model_len=max_model_len),
        worker=msgspec.structs.replace(config.worker, kv_memory=str(kv_memory), host_kv_memory=str(host_memory)),
    )
    return Resolved(config=resolved, plan=plan, reasons=tuple(reasons), rank_cpus=rank_cpus)


def _check(config: Config) -> None:
    """What contradicts itself on any machine."""
    if config.scheduler.prefer == "prefill" and config.scheduler.max_itl_ms is not None:
        raise ConfigError("--max-itl-ms: not with --prefer prefill, which lets streams wait while prompts are computed")
    if config.scheduler.stop_on_loop == 1:
        raise ConfigError("--stop-on-loop 1: must be 0 or at least 2: what stands once is not repeated")
    if taken := _TEMPLATE_NAMES.intersection(config.server.chat_template_kwargs):
        raise ConfigError(f"--chat-template-kwargs: the server itself says what {', '.join(sorted(taken))} is")


def _settle_batches(config: Config, arch: ModelArch, machine: Machine, reasons: list[str]) -> Config:
    """With the sizes of steps, and of the graphs that hold some of them."""
    asked = config.scheduler
    device = config.worker.device
    max_seqs = asked.max_seqs
    if max_seqs is None:
        max_seqs = min(_MAX_SEQS[device], asked.max_step_tokens or _MAX_SEQS[device])
        reasons.append(f"max_seqs {max_seqs}: the default for {'a GPU' if device == 'cuda' else 'a CPU'}")
    step_tokens = asked.max_step_tokens
    if step_tokens is None:
        step_tokens = max(_step_tokens(config, arch, machine), max_seqs)
        reasons.append(f"max_step_tokens {step_tokens}: {_WHY_STEP_TOKENS[device]}")
    if max_seqs > step_tokens:
        raise ConfigError(
            f"--max-seqs {max_seqs}: must not be more than --max-step-tokens, which is {step_tokens}: "
            "each running request needs one token of a step"
        )
    chunk = asked.prefill_chunk or step_tokens
    if chunk > step_tokens:
        raise ConfigError(f"--prefill-chunk {chunk}: must not be more than --max-step-tokens, which is {step_tokens}")
    graph_seqs = device_choices.max_graph_seqs(config, device, max_seqs)
    return msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(asked, max_seqs=max_seqs, max_step_tokens=step_tokens, prefill_chunk=chunk),
        worker=msgspec.structs.replace(config.worker, cuda_graphs=graph_seqs > 0, max_graph_seqs=graph_seqs),
    )


def _step_tokens(config: Config, arch: ModelArch, machine: Machine) -> int:
    """Tokens of a step, as the device takes them."""
    if config.worker.device == "cpu":
        return _STEP_TOKENS
    tokens = next(tokens for size, tokens in _GPU_STEP_TOKENS if machine.gpus[0].total_bytes >= size)
    weights, _ = gpu_memory.gpu_weight_bytes(arch, config.model, config.worker.tp)
    room = _GPU_STEP_SHARE * (_usable(config, machine) - weights)
    token = gpu_memory.token_width(arch, config.worker.tp) * memory_plan.DTYPE_BYTES[config.model.dtype]
    while tokens > _STEP_TOKENS and tokens * token > room:
        tokens //= 2
    return tokens


def _usable(config: Config, machine: Machine) -> int:
    """Bytes of its GPU that a rank may use."""
    gpu = machine.gpus[0]
    return min(gpu.free_bytes, int(config.worker.gpu_memory_share * gpu.total_bytes))


def _draft(config: Config, arch: ModelArch, machine: Machine, length: int) -> MemoryPlan:
    """The plan without KV, for sequences of `length` tokens; all else of `config` is settled."""
    scheduler, worker, model, tp = config.scheduler, config.worker, config.model, config.worker.tp
    assert scheduler.max_step_tokens is not None
    assert scheduler.max_seqs is not None
    step, seqs, dtype = scheduler.max_step_tokens, scheduler.max_seqs, model.dtype
    is_native, buffers = worker.kernels == "native", None
    if worker.kernels == "triton":
        weights, note = gpu_memory.gpu_weight_bytes(arch, model, tp)
        buffers = gpu_memory.gpu_buffers(arch, dtype, model.kv_dtype, step, seqs, length, scheduler.block_size, tp)
    else:
        weights, note = memory_plan.weight_bytes(arch, model, is_native, machine.has_bfloat16, tp)
    is_cuda = worker.device == "cuda"
    runtime = gpu_memory.GPU_RANK_RUNTIME if is_cuda else memory_plan.RANK_RUNTIME
    others = 2 + config.server.frontends + config.tokenizer.tokenizers
    kv_block_size = scheduler.block_size if is_native else 0
    return MemoryPlan(
        tp=tp,
        weights=weights,
        activations=buffers.total if buffers else memory_plan.activation_bytes(arch, dtype, step, seqs, tp),
        runtime_total=tp * runtime + others * memory_plan.PROCESS_RUNTIME,
        kv_bytes_per_token=memory_plan.kv_bytes_per_token(arch, model.kv_dtype, tp, kv_block_size),
        block_size=scheduler.block_size,
        num_blocks=0,
        memory_available=machine.memory_available,
        weight_note=note,
        gpu=_gpu_budget(config, arch, machine, length) if is_cuda else None,
        buffers=buffers.named() if buffers else (),
    )


def _gpu_budget(config: Config, arch: ModelArch, machine: Machine, length: int) -> GpuBudget:
    gpu, model, worker = machine.gpus[0], config.model, config.worker
    block_size, graph_seqs = config.scheduler.block_size, worker.max_graph_seqs or 0
    return GpuBudget(
        name=gpu.name,
        total=gpu.total_bytes,
        free=gpu.free_bytes,
        usable=_usable(config, machine),
        graphs=gpu_memory.graph_bytes(arch, model.dtype, model.kv_dtype, graph_seqs, length, block_size, worker.tp),
        runtime=gpu_memory.CUDA_RUNTIME,
        elsewhere=machine.plans_elsewhere,
    )


def _pooling(config: Config, arch: ModelArch, reasons: list[str]) -> str:
    """How embeddings are made, which most models say nothing of."""
    if config.model.pooling != "auto":
        return config.model.pooling
    names = [name for name in get_args(PoolingName) if name != "auto"]
    if arch.pooling and arch.pooling not in names:
        raise ConfigError(
            f"--model {config.model.model}: it declares pooling {arch.pooling!r} for embeddings, which is not "
            f"supported; --pooling {'|'.join(names)} serves it with another"
        )
    pooling = arch.pooling or "last"
    reasons.append(f"pooling {pooling}: {'what the model declares' if arch.pooling else 'the model declares none'}")
    return pooling


def _kv_memory(config: Config, plan: MemoryPlan, arch: ModelArch, reasons: list[str]) -> int:
    """Bytes for the KV pool of each rank, at least one block."""
    asked = config.worker.kv_memory
    if asked is not None:
        return _asked_memory("--kv-memory", asked, plan)
    length = config.model.max_model_len or arch.max_position
    size, why = _gpu_kv_memory(config, plan, length) if plan.gpu else _cpu_kv_memory(config, plan, length)
    size = max(size, plan.block_bytes)
    reasons.append(f"kv_memory {format_size(size)}{' a rank' if plan.tp > 1 else ''}: {why}")
    return size


def _gpu_kv_memory(config: Config, plan: MemoryPlan, length: int) -> tuple[int, str]:
    """All that is left; but not less than what a server needs, so that it is seen how much is missing."""
    assert plan.gpu is not None
    left = plan.gpu.usable - plan.gpu_total
    needed = length if config.model.max_model_len else min(_USEFUL_TOKENS, length)
    need = plan.bytes_of(needed)
    if left < need:
        return need, f"what one sequence of {needed} tokens needs"
    return left, f"what is left of {format_size(plan.gpu.usable)} that may be used of {plan.gpu.name}"


def _cpu_kv_memory(config: Config, plan: MemoryPlan, length: int) -> tuple[int, str]:
    max_seqs = config.scheduler.max_seqs or 1
    choices = {
        f"what {max_seqs} sequences of {length} tokens need": max_seqs * plan.bytes_of(length),
        f"a quarter of the {format_size(plan.memory_available)} available": int(
            plan.memory_available * _KV_SHARE / plan.tp
        ),
        f"the default limit of {format_size(_KV_CAP)}": _KV_CAP // plan.tp,
    }
    left = (plan.memory_available - plan.total) // plan.tp
    if left >= min(_USEFUL_TOKENS, length) * plan.kv_bytes_per_token:
        choices["what is left after weights and activations"] = left
    why = min(choices, key=lambda name: choices[name])
    return choices[why], why


def _asked_memory(flag: str, text: str, plan: MemoryPlan) -> int:
    """Bytes of a pool that the user asked for; ConfigError unless they are a size and hold one block."""
    try:
        asked = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if asked < plan.block_bytes:
        raise ConfigError(
            f"{flag} {text}: must hold one block of {plan.block_size} tokens, which takes "
            f"{format_size(plan.block_bytes)}"
        )
    return asked


def _asked_host_memory(config: Config, plan: MemoryPlan) -> int | None:
    """Bytes for the host tier of each rank, where the user chose them."""
    text = config.worker.host_kv_memory
    swap = config.scheduler.kv_shortage == "swap"
    if text is not None and text.strip() == "0":
        if swap:
            raise ConfigError(
                f"--kv-shortage swap: needs host memory for at least one block, {format_size(plan.block_bytes)}, but "
                "--host-kv-memory is 0"
            )
        return 0
    if not config.scheduler.prefix_cache and (swap or text is not None):
        asked = "--kv-shortage swap" if swap else f"--host-kv-memory {text}"
        raise ConfigError(f"{asked}: does not go with --no-prefix-cache, as blocks in host memory belong to that cache")
    return None if text is None else _asked_memory("--host-kv-memory", text, plan)


def _default_host_memory(config: Config, plan: MemoryPlan, reasons: list[str]) -> int:
    """Bytes for the host tier of each rank: none, or with swapping at least one block."""
    if config.scheduler.kv_shortage != "swap":
        return 0
    half = (plan.memory_available - plan.total) // (2 * plan.tp)
    size = max(min(plan.kv, half // plan.block_bytes * plan.block_bytes), plan.block_bytes)
    why = "to swap to, as much as the KV cache" if plan.kv <= half else "to swap to, half of what memory is left"
    reasons.append(f"host_kv_memory {format_size(size)}{' a rank' if plan.tp > 1 else ''}: {why}")
    return size


def _longest(config: Config, arch: ModelArch, machine: Machine) -> int:
    """The longest sequence that the model takes, or of which a GPU holds the KV beside the buffers for it."""
    low, high = min(_USEFUL_TOKENS, arch.max_position), arch.max_position
    if config.worker.device == "cpu" or config.worker.kv_memory is not None:
        return high
    middle = high
    while low < high:
        plan = _draft(config, arch, machine, middle)
        if plan.gpu is not None and plan.gpu_total + plan.bytes_of(middle) <= plan.gpu.usable:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def _max_model_len(config: Config, arch: ModelArch, plan: MemoryPlan, longest: int, reasons: list[str]) -> int:
    asked, kv_memory = config.model.max_model_len, config.worker.kv_memory
    if asked is not None:
        if asked <= plan.kv_tokens:
            return asked
        given = f"--kv-memory {kv_memory}" if kv_memory else "the memory found for it"
        raise ConfigError(
            f"--max-model-len {asked}: one such sequence takes {format_size(plan.bytes_of(asked))} of KV cache, but "
            f"{given} holds {plan.kv_tokens} tokens; raise --kv-memory or ask for less"
        )
    length = min(longest, plan.kv_tokens)
    if length == arch.max_position:
        reasons.append(f"max_model_len {length}: what the model declares")
    else:
        hint = "" if plan.gpu and kv_memory is None else "; raise --kv-memory"
        reasons.append(
            f"max_model_len {length}: the KV cache holds no more (the model declares {arch.max_position}{hint})"
        )
    return length
