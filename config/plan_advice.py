"""What to do about a plan that does not fit: one paragraph.

For GPUs, each way out that is named has been planned and does fit; what does not help is not named. Settings that help
only together are named together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from config.bytesize import format_size
from config.gpu_cards import cards
from config.machine import Gpu, Machine
from config.memory_plan import MemoryPlan, kv_bytes_per_token
from config.resolve import Resolved, resolve
from config.schema import Config, ModelArch, WeightFormats
from config.sources import ConfigError

_GIB = 1 << 30
_MIB = 1 << 20
_LARGEST_GPU = 1024  # GiB
_LENGTHS, _LEAST_LENGTH = 256, 512  # tokens: in such steps, and not less, since nobody has a use for it
_STEPS, _LEAST_STEP = 64, 256  # likewise
_LARGEST_SHARE = 95  # percent of a GPU's memory: some of what it takes is estimated, and other programs want a little


class Way(Struct, frozen=True, kw_only=True):
    """A way out, in words, and what is planned then."""

    text: str
    config: Config
    arch: ModelArch
    machine: Machine

    def resolved(self) -> Resolved | None:
        """None where such settings are refused."""
        try:
            return resolve(self.config, self.arch, self.machine)
        except ConfigError:
            return None

    @property
    def fits(self) -> bool:
        resolved = self.resolved()
        return resolved is not None and resolved.plan.fits

    def but(self, text: str, **changes: Any) -> "Way":
        """This one with something else changed as well."""
        return msgspec.structs.replace(self, text=f"{self.text}, and {text}" if self.text else text, **changes)

    def setting(self, text: str, section: str, **values: Any) -> "Way":
        """This one with settings of a section changed as well."""
        owner = msgspec.structs.replace(getattr(self.config, section), **values)
        return self.but(text, config=msgspec.structs.replace(self.config, **{section: owner}))


def shortage(config: Config, arch: ModelArch, machine: Machine, resolved: Resolved) -> str:
    """Why `resolved`, made of the others by `resolve`, does not fit, and what helps."""
    if resolved.plan.gpu is None:
        return _cpu_shortage(Way(text="", config=config, arch=arch, machine=machine), resolved)
    helps = "; ".join(way.text for way in ways_out(config, arch, machine))
    if not helps:
        return f"{_gpu_shortage(resolved, arch)} No setting helps, nor any GPU: use a smaller model."
    return f"{_gpu_shortage(resolved, arch)} Do one of these: {helps}."


def _gpu_shortage(resolved: Resolved, arch: ModelArch) -> str:
    plan, config = resolved.plan, resolved.config
    gpu, said = plan.gpu, []
    assert gpu is not None
    if not plan.fits_gpu:
        free = f", since {format_size(gpu.total - gpu.free)} are in use" if gpu.usable == gpu.free < gpu.total else ""
        said.append(
            f"{arch.name or 'The model'} with sequences of {config.model.max_model_len} tokens, up to "
            f"{config.scheduler.max_seqs} at once, is {format_size(plan.gpu_total - gpu.usable)} short on {gpu.name}: "
            f"weights take {format_size(plan.weights)}, the KV cache of {plan.kv_tokens} tokens "
            f"{format_size(plan.kv)}, buffers for steps of {config.scheduler.max_step_tokens} tokens "
            f"{format_size(plan.activations)}, CUDA graphs about {format_size(gpu.graphs)} and CUDA itself about "
            f"{format_size(gpu.runtime)}, together {format_size(plan.gpu_total)}, but only {format_size(gpu.usable)} "
            f"of {format_size(gpu.total)} may be used{free}."
        )
    if not plan.fits_host:
        host = f", {format_size(plan.tp * plan.host_kv)} of it for the host tier" if plan.num_host_blocks else ""
        said.append(
            f"The engine needs about {format_size(plan.total)} of the machine's own memory{host}, but only "
            f"{format_size(plan.memory_available)} is available."
        )
    return " ".join(said)


def ways_out(config: Config, arch: ModelArch, machine: Machine) -> list[Way]:
    """Of a plan for a GPU that does not fit: each of them fits."""
    start = Way(text="", config=config, arch=arch, machine=machine)
    resolved = start.resolved()
    if resolved is None or resolved.plan.gpu is None or resolved.plan.fits:
        return []
    if not resolved.plan.fits_host:
        larger = _larger_machine(start, resolved.plan)
        if larger.fits:
            return [*_smaller_host_tier(start, resolved.plan), larger]
        start = larger  # alone it does not help
    knobs = _knobs(start, resolved)
    ways = [way for knob in knobs if (way := _turned(start, knob))] or _together(start, knobs)
    for way in _lighter_weights(start, resolved):
        ways += [way] if way.fits else _together(way, knobs)
    return [*ways, *_other_devices(start, resolved.plan)]


# --- settings --------------------------------------------------------------------------------------------------------


class _Knob(Struct, frozen=True, kw_only=True):
    """A setting that can be turned, to what is meant by `least`, where most is saved, up to `most`."""

    turn: Callable[[Way, int], Way]
    least: int = 1
    most: int = 1


def _knobs(start: Way, resolved: Resolved) -> list[_Knob]:
    """What `resolved`, made of `start`, leaves to turn down; those first that are missed least."""
    asked, plan = start.config, resolved.plan
    model, scheduler, worker = resolved.config.model, resolved.config.scheduler, resolved.config.worker
    whole = round(worker.gpu_memory_share * 100)
    knobs = [_Knob(turn=_larger_share, least=100 - _LARGEST_SHARE, most=100 - whole - 1)]
    # A KV cache whose size was asked for is no smaller with smaller keys.
    if model.kv_dtype in ("bfloat16", "float16") and asked.worker.kv_memory is None:
        sizes = format_size(kv_bytes_per_token(start.arch, "fp8", plan.tp)), format_size(plan.kv_bytes_per_token)
        knobs.append(_Knob(turn=partial(_smaller_keys, sizes)))
    if worker.max_graph_seqs:
        knobs.append(_Knob(turn=_without_graphs))
    knobs.append(_Knob(turn=_fewer_sequences, most=(scheduler.max_seqs or 1) - 1))
    shorter_step = ((scheduler.max_step_tokens or 1) - 1) // _STEPS
    knobs.append(_Knob(turn=_shorter_steps, least=_LEAST_STEP // _STEPS, most=shorter_step))
    if asked.worker.kv_memory is not None:
        least = _mebibytes(plan.bytes_of(asked.model.max_model_len or _LEAST_LENGTH))
        knobs.append(_Knob(turn=_smaller_kv, least=least, most=plan.kv // _MIB))
    if asked.model.max_model_len is not None:
        shorter = (asked.model.max_model_len - 1) // _LENGTHS
        knobs.append(_Knob(turn=_shorter_sequences, least=_LEAST_LENGTH // _LENGTHS, most=shorter))
    return [knob for knob in knobs if knob.least <= knob.most]


def _larger_share(way: Way, rest: int) -> Way:
    """All but `rest` percent."""
    share = (100 - rest) / 100
    return way.setting(f"--gpu-memory-share {share:g}", "worker", gpu_memory_share=share)


def _smaller_keys(sizes: tuple[str, str], way: Way, _: int) -> Way:
    text = f"--kv-dtype fp8, in which a token's KV takes {sizes[0]} instead of {sizes[1]}"
    return way.setting(text, "model", kv_dtype="fp8")


def _without_graphs(way: Way, _: int) -> Way:
    if way.config.worker.max_graph_seqs is None:
        return way.setting("--no-cuda-graphs", "worker", cuda_graphs=False)
    return way.setting("--max-graph-seqs 0", "worker", max_graph_seqs=0)


def _fewer_sequences(way: Way, count: int) -> Way:
    return way.setting(f"--max-seqs {count}", "scheduler", max_seqs=count)


def _shorter_steps(way: Way, count: int) -> Way:
    tokens = count * _STEPS
    return way.setting(f"--max-step-tokens {tokens}", "scheduler", max_step_tokens=tokens)


def _smaller_kv(way: Way, mebibytes: int) -> Way:
    return way.setting(f"--kv-memory {mebibytes}MiB", "worker", kv_memory=f"{mebibytes}MiB")


def _shorter_sequences(way: Way, count: int) -> Way:
    tokens = count * _LENGTHS
    return way.setting(f"--max-model-len {tokens}", "model", max_model_len=tokens)


def _turned(start: Way, knob: _Knob) -> Way | None:
    """With one knob turned down as little as possible; None where that is not enough."""
    value = _largest(lambda value: knob.turn(start, value), knob.least, knob.most)
    return None if value is None else knob.turn(start, value)


def _together(start: Way, knobs: list[_Knob]) -> list[Way]:
    """With several knobs turned down, none of them in vain; empty where not even all are enough."""
    chosen: dict[int, int] = {}  # index of the knob -> its value

    def way(values: dict[int, int]) -> Way:
        found = start
        for index, value in values.items():
            found = knobs[index].turn(found, value)
        return found

    for index, knob in enumerate(knobs):
        chosen[index] = knob.least
        if way(chosen).fits:
            break
    if not way(chosen).fits:
        return []
    for index in reversed(list(chosen)):
        fewer = {other: value for other, value in chosen.items() if other != index}
        if way(fewer).fits:
            chosen = fewer
    for index in chosen:

        def turned(value: int, index: int = index) -> Way:
            return way(chosen | {index: value})

        chosen[index] = _largest(turned, knobs[index].least, knobs[index].most) or knobs[index].least
    return [way(chosen)]


def _largest(make: Callable[[int], Way], least: int, most: int) -> int | None:
    """The largest number whose way fits, where those below it fit, too."""
    if least > most or not make(least).fits:
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if make(middle).fits else (least, middle - 1)
    return least


# --- other weights, devices and machines -----------------------------------------------------------------------------


def _lighter_weights(start: Way, resolved: Resolved) -> list[Way]:
    """The same model in fewer bits, whether that is enough or not."""
    return [*_rounded_weights(start, resolved.plan), *_other_weights(start, resolved)]


def _rounded_weights(start: Way, plan: MemoryPlan) -> list[Way]:
    """With floats rounded to integers as they are loaded, where that saves something."""
    if start.config.model.quantization not in ("auto", "none"):
        return []  # what was asked for is not undone, nor made coarser
    if set(start.arch.formats.layers).issubset({"int8", "int4"}) and start.arch.formats.layers:
        return []
    ways = []
    for bits in ("int8", "int4"):
        way = start.setting(f"--quantization {bits}", "model", quantization=bits)
        then = way.resolved()
        if then is not None and then.plan.weights < plan.weights:
            saved = format_size(plan.weights - then.plan.weights)
            ways.append(msgspec.structs.replace(way, text=f"{way.text}, which saves {saved} of weights"))
    return ways


def _other_weights(start: Way, resolved: Resolved) -> list[Way]:
    """With the weights' integers kept, or with another checkpoint."""
    formats = start.arch.formats
    integers = {"int4", "int8"}.intersection(formats.layers)
    as_they_are = start
    if start.config.model.quantization == "none":  # then weights of fewer bits are as large as others
        as_they_are = start.setting("--quantization auto", "model", quantization="auto")
        if integers:
            return [as_they_are]
    if set(formats.layers) == {"int4"}:
        return []
    layers = WeightFormats(layers={"int4": 1}, embedding=formats.embedding, head=formats.head)
    arch = msgspec.structs.replace(start.arch, formats=layers)
    then = msgspec.structs.replace(as_they_are, arch=arch).resolved()
    if then is None or then.plan.weights >= resolved.plan.weights:
        return []
    saved = format_size(resolved.plan.weights - then.plan.weights)
    text = f"the same model with 4-bit weights (GPTQ, AWQ, or a GGUF file of Q4_0, Q4_1 or Q4_K), which saves {saved}"
    return [as_they_are.but(text, arch=arch)]


def _other_devices(start: Way, plan: MemoryPlan) -> list[Way]:
    """Those that fit: this GPU without other programs, the CPU, the smallest GPU that is large enough."""
    gpu, ways = start.machine.gpus[0], []
    if gpu.free_bytes < gpu.total_bytes:
        text = f"ending the other programs on this GPU, which hold {format_size(gpu.total_bytes - gpu.free_bytes)}"
        ways.append(_on(start, text, gpu.sized(gpu.total_bytes)))
    if not start.machine.plans_elsewhere:
        ways.append(start.setting("--device cpu", "worker", device="cpu"))
    size = _largest(lambda size: _on(start, "", gpu.sized((_LARGEST_GPU - size) * _GIB)), 0, _LARGEST_GPU - 1)
    if size is not None:
        needed = _LARGEST_GPU - size
        named = [card.name for card in cards() if _on(start, "", card).fits]
        such = f", such as {named[0]}" if named else ""
        ways.append(_on(start, f"a GPU with {needed} GiB of memory{such}", gpu.sized(needed * _GIB)))
    return [way for way in ways if way.fits]


def _on(start: Way, text: str, gpu: Gpu) -> Way:
    return start.but(text, machine=start.machine.on(gpu))


def _larger_machine(start: Way, plan: MemoryPlan) -> Way:
    size = -(-plan.total // _GIB)
    machine = msgspec.structs.replace(start.machine, memory_available=size * _GIB)
    return start.but(f"a machine with {size} GiB of free memory", machine=machine)


def _smaller_host_tier(start: Way, plan: MemoryPlan) -> list[Way]:
    """Where that is enough."""

    def way(size: int) -> Way:
        return start.setting(f"--host-kv-memory {size}MiB", "worker", host_kv_memory=f"{size}MiB")

    size = _largest(way, _mebibytes(plan.block_bytes), plan.host_kv // _MIB)
    return [] if size is None else [way(size)]


def _mebibytes(size: int) -> int:
    return -(-size // _MIB)


# --- CPUs ------------------------------------------------------------------------------------------------------------


def _cpu_shortage(start: Way, resolved: Resolved) -> str:
    plan, config = resolved.plan, resolved.config
    without_tiers = plan.total - plan.tp * (plan.kv + plan.host_kv)
    room = (plan.memory_available - without_tiers) // plan.tp
    advice = []
    if room > 0:
        size = f"{max(1, room >> 20)}MiB or less"
        together = f"--kv-memory and --host-kv-memory of together {size}"
        advice.append(together if plan.num_host_blocks else f"--kv-memory {size}")
    else:
        if config.model.dtype == "float32":
            advice.append("--dtype bfloat16, where the CPU has bfloat16 instructions")
        advice.append("a smaller model")
    advice[:0] = [way.text for way in _rounded_weights(start, plan) if way.fits]
    advice.append("a machine with more free memory")
    host = f", the host tier {format_size(plan.tp * plan.host_kv)}" if plan.num_host_blocks else ""
    return (
        f"The model does not fit: weights take {format_size(plan.tp * plan.weights)}, activations about "
        f"{format_size(plan.tp * plan.activations)}, the KV cache {format_size(plan.tp * plan.kv)}{host} and the "
        f"processes about {format_size(plan.runtime_total)}, together {format_size(plan.total)}, but only "
        f"{format_size(plan.memory_available)} is available. What helps: {', or '.join(advice)}."
    )
