"""From what the user asked for to what will run: fills in every setting left open, and says why.

Pure: all that is known of the machine comes in as `Machine`, gathered by `launch.machine`.
"""

from typing import get_args

import msgspec
from msgspec import Struct

from config import memory_plan
from config.bytesize import format_size, parse_size
from config.machine import Machine
from config.memory_plan import MemoryPlan
from config.schema import Config, ModelArch, PoolingName
from config.sources import ConfigError

# What the server passes to chat templates, with `tokenizer_proc.template_child`.
_TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

_KV_SHARE = 0.25  # of available memory, at most, when --kv-memory is not given
_KV_CAP = 4 << 30
_MAX_SEQS = 64
_STEP_TOKENS = 512
_USEFUL_TOKENS = 512  # a KV cache for fewer is no server: then the plan is one that does not fit


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
    device = _device(config, machine, reasons)
    dtype = _dtype(config, machine, reasons)
    native_kernels = _native_kernels(config, machine, reasons)
    kv_dtype = _kv_dtype(config, dtype, native_kernels, machine, reasons)
    pooling = _pooling(config, arch, reasons)
    tp = config.worker.tp
    if not memory_plan.can_split(arch, tp):
        fitting = [str(n) for n in range(1, 65) if memory_plan.can_split(arch, n)]
        raise ConfigError(
            f"--tp {tp}: the model's {arch.num_heads} heads, {arch.num_kv_heads} KV heads and MLP width "
            f"{arch.intermediate_size} do not divide among {tp} ranks; possible: {', '.join(fitting)}"
        )
    step_tokens = config.scheduler.max_step_tokens
    max_seqs = config.scheduler.max_seqs or min(_MAX_SEQS, step_tokens or _MAX_SEQS)
    if step_tokens is None:
        step_tokens = max(_STEP_TOKENS, max_seqs)
        reasons.append(f"max_step_tokens {step_tokens}: a CPU gains little from longer steps")
    if max_seqs > step_tokens:
        raise ConfigError(
            f"--max-seqs {max_seqs}: must not be more than --max-step-tokens, which is {step_tokens}: "
            "each running request needs one token of a step"
        )
    chunk = config.scheduler.prefill_chunk or step_tokens
    if chunk > step_tokens:
        raise ConfigError(f"--prefill-chunk {chunk}: must not be more than --max-step-tokens, which is {step_tokens}")
    if config.scheduler.prefer == "prefill" and config.scheduler.max_itl_ms is not None:
        raise ConfigError("--max-itl-ms: not with --prefer prefill, which lets streams wait while prompts are computed")
    if config.scheduler.stop_on_loop == 1:
        raise ConfigError("--stop-on-loop 1: must be 0 or at least 2: what stands once is not repeated")
    if taken := _TEMPLATE_NAMES.intersection(config.server.chat_template_kwargs):
        raise ConfigError(f"--chat-template-kwargs: the server itself says what {', '.join(sorted(taken))} is")
    threads = config.worker.threads
    if threads is None:
        threads = max(1, machine.cores // tp)
        reasons.append(f"threads {threads}: {machine.cores} physical cores for {tp} rank{'s' if tp > 1 else ''}")
    rank_cpus = _rank_cpus(config, threads, native_kernels, machine, reasons)

    asked_len = config.model.max_model_len
    if asked_len is not None and asked_len > arch.max_position:
        raise ConfigError(f"--max-model-len {asked_len}: the model was made for at most {arch.max_position} positions")
    model = msgspec.structs.replace(config.model, dtype=dtype, kv_dtype=kv_dtype, pooling=pooling)
    weights, weight_note = memory_plan.weight_bytes(arch, model, native_kernels, machine.has_bfloat16, tp)
    draft = MemoryPlan(
        tp=tp,
        weights=weights,
        activations=memory_plan.activation_bytes(arch, dtype, step_tokens, max_seqs, tp),
        runtime_total=tp * memory_plan.RANK_RUNTIME
        + (2 + config.server.frontends + config.tokenizer.tokenizers) * memory_plan.PROCESS_RUNTIME,
        kv_bytes_per_token=memory_plan.kv_bytes_per_token(
            arch, kv_dtype, tp, config.scheduler.block_size if native_kernels else 0
        ),
        block_size=config.scheduler.block_size,
        num_blocks=0,
        memory_available=machine.memory_available,
        weight_note=weight_note,
    )
    asked_host = _asked_host_memory(config, draft)
    draft = msgspec.structs.replace(draft, num_host_blocks=(asked_host or 0) // draft.block_bytes)
    kv_memory = _kv_memory(config, draft, max_seqs, asked_len or arch.max_position, machine, reasons)
    plan = msgspec.structs.replace(draft, num_blocks=kv_memory // draft.block_bytes)
    host_memory = _default_host_memory(config, plan, reasons) if asked_host is None else asked_host
    plan = msgspec.structs.replace(plan, num_host_blocks=host_memory // plan.block_bytes)
    max_model_len = _max_model_len(asked_len, arch, plan, config.worker.kv_memory, reasons)

    resolved = Config(
        model=msgspec.structs.replace(model, max_model_len=max_model_len),
        server=config.server,
        tokenizer=config.tokenizer,
        scheduler=msgspec.structs.replace(
            config.scheduler, max_seqs=max_seqs, max_step_tokens=step_tokens, prefill_chunk=chunk
        ),
        worker=msgspec.structs.replace(
            config.worker,
            device=device,
            threads=threads,
            kernels="native" if native_kernels else "torch",
            kv_memory=str(kv_memory),
            host_kv_memory=str(host_memory),
            deterministic=True if config.worker.deterministic is None else config.worker.deterministic,
        ),
        supervisor=config.supervisor,
    )
    return Resolved(config=resolved, plan=plan, reasons=tuple(reasons), rank_cpus=rank_cpus)


def _device(config: Config, machine: Machine, reasons: list[str]) -> str:
    if config.worker.device == "cuda":
        found = f"this machine has {len(machine.gpus)}" if machine.gpus else "no NVIDIA GPU was found here"
        raise ConfigError(f"--device cuda: this version runs models on CPUs only ({found}); use --device cpu or auto")
    if config.worker.device == "auto":
        why = "this version has no GPU backend yet" if machine.gpus else "no GPU was found"
        reasons.append(f"device cpu: {why}")
    return "cpu"


def _dtype(config: Config, machine: Machine, reasons: list[str]) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    if machine.has_bfloat16:
        reasons.append("dtype bfloat16: this CPU multiplies it in hardware")
        return "bfloat16"
    reasons.append("dtype float32: this CPU has no bfloat16 instructions, without which bfloat16 is slower")
    return "float32"


def _native_kernels(config: Config, machine: Machine, reasons: list[str]) -> bool:
    """Whether the ranks use compiled kernels."""
    if config.worker.kernels != "auto":
        return config.worker.kernels == "native"
    if machine.native_kernels:
        reasons.append("kernels native: they are compiled for this CPU")
    else:
        reasons.append(f"kernels torch, many times slower: compiled ones can't be had: {machine.kernels_problem}")
    return machine.native_kernels


def _rank_cpus(
    config: Config, threads: int, native_kernels: bool, machine: Machine, reasons: list[str]
) -> tuple[tuple[int, ...], ...]:
    """For --pin-threads, a CPU for each compute thread of each rank; neighbouring cores for each rank."""
    if not config.worker.pin_threads:
        return ()
    if not native_kernels:
        raise ConfigError(
            "--pin-threads: only threads of compiled kernels can be bound to cores, not plain torch's"
            + _why_torch(config, machine)
        )
    tp, cpus = config.worker.tp, machine.core_cpus
    if not cpus:
        raise ConfigError("--pin-threads: this system does not let a process bind its threads to cores")
    if tp * threads > len(cpus):
        raise ConfigError(
            f"--pin-threads: {tp} rank{'s' if tp > 1 else ''} of --threads {threads} need{'' if tp > 1 else 's'} "
            f"{tp * threads} physical cores, but this process may use {len(cpus)}"
        )
    ranks = tuple(cpus[rank * threads : (rank + 1) * threads] for rank in range(tp))
    named = "; ".join(f"rank {rank} {','.join(map(str, of_rank))}" for rank, of_rank in enumerate(ranks))
    reasons.append(f"pin_threads on: CPUs of {named}")
    return ranks


def _why_torch(config: Config, machine: Machine) -> str:
    """What to say behind the words that there are no compiled kernels."""
    if config.worker.kernels == "torch":
        return " (--kernels torch asks for none)"
    return f", which can't be had: {machine.kernels_problem}"


def _kv_dtype(config: Config, dtype: str, native_kernels: bool, machine: Machine, reasons: list[str]) -> str:
    asked = config.model.kv_dtype
    if not native_kernels:
        if asked not in ("auto", dtype):
            raise ConfigError(
                f"--kv-dtype {asked}: plain torch operations keep keys and values in the dtype they compute in, "
                f"{dtype}; another one needs compiled kernels{_why_torch(config, machine)}"
            )
        return dtype
    if asked != "auto":
        return asked
    reasons.append("kv_dtype float16: half of what float32 takes, to 3 decimal digits")
    return "float16"


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


def _kv_memory(
    config: Config, plan: MemoryPlan, max_seqs: int, length: int, machine: Machine, reasons: list[str]
) -> int:
    """Bytes for the KV pool of each rank, at least one block."""
    if config.worker.kv_memory is not None:
        return _asked_memory("--kv-memory", config.worker.kv_memory, plan)
    block = plan.block_bytes
    blocks_needed = max_seqs * -(-length // plan.block_size)
    choices = {
        f"what {max_seqs} sequences of {length} tokens need": blocks_needed * block,
        f"a quarter of the {format_size(machine.memory_available)} available": int(
            machine.memory_available * _KV_SHARE / plan.tp
        ),
        f"the default limit of {format_size(_KV_CAP)}": _KV_CAP // plan.tp,
    }
    left = (machine.memory_available - plan.total) // plan.tp
    if left >= min(_USEFUL_TOKENS, length) * plan.kv_bytes_per_token:
        choices["what is left after weights and activations"] = left
    why = min(choices, key=lambda name: choices[name])
    size = max(choices[why], block)
    reasons.append(f"kv_memory {format_size(size)}{' a rank' if plan.tp > 1 else ''}: {why}")
    return size


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


def _max_model_len(
    asked: int | None, arch: ModelArch, plan: MemoryPlan, kv_memory: str | None, reasons: list[str]
) -> int:
    wanted = asked or arch.max_position
    if wanted <= plan.kv_tokens:
        if asked is None:
            reasons.append(f"max_model_len {wanted}: what the model declares")
        return wanted
    if asked is not None:
        blocks = -(-asked // plan.block_size)
        need = blocks * plan.block_size * plan.kv_bytes_per_token
        given = f"--kv-memory {kv_memory}" if kv_memory else "the memory found for it"
        raise ConfigError(
            f"--max-model-len {asked}: one such sequence takes {format_size(need)} of KV cache, but {given} holds "
            f"{plan.kv_tokens} tokens; raise --kv-memory or ask for less"
        )
    reasons.append(
        f"max_model_len {plan.kv_tokens}: the KV cache holds no more (the model declares {wanted}; raise --kv-memory)"
    )
    return plan.kv_tokens
