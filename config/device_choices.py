"""What `config.resolve` chooses by the device: the device itself, kernels, number types, threads, CUDA graphs.

Each function takes what the user asked for and adds a reason for what it chose instead of them. ConfigError says what
cannot be.
"""

from typing import Literal

from config.machine import Gpu, Machine
from config.schema import Config, ModelArch
from config.sources import ConfigError

Kernels = Literal["native", "torch", "triton"]

HEAD_STEP, LARGEST_HEAD = 16, 256  # of the dimension of heads, as in `kernels.gpu.attention_tile`
_GPU_THREADS = 8  # at most, by default; the other processes need cores, too
_MAX_GRAPH_SEQS = 256
# Behind the name of a GPU that nobody asked for. It goes when the backend has run on one.
_NOT_RUN = "; its kernels have been tested without a GPU only: --device cpu takes the CPU instead"
_OLDEST = 80  # sm_80, Ampere: the first with bfloat16 and asynchronous copies


def device(config: Config, arch: ModelArch, machine: Machine, reasons: list[str]) -> Literal["cpu", "cuda"]:
    if config.worker.device == "cpu":
        return "cpu"
    problem = _gpu_problem(machine) or _heads_problem(arch)
    if not problem and config.worker.kernels in ("native", "torch"):
        problem = f"--kernels {config.worker.kernels} is for CPUs"
    if not problem:
        if config.worker.tp > 1:
            raise ConfigError(
                f"--tp {config.worker.tp}: on GPUs this version runs one rank only; use --tp 1, or --device cpu"
            )
        if config.worker.device == "auto":
            software = f" ({machine.gpu_software})" if machine.gpu_software else ""
            proven = "" if machine.plans_elsewhere else _NOT_RUN
            reasons.append(f"device cuda: {machine.gpus[0].name}{software}{proven}")
        return "cuda"
    if machine.plans_elsewhere:
        raise ConfigError(f"--plan-gpu: {problem}")
    if config.worker.device == "cuda":
        raise ConfigError(
            f"--device cuda: {problem}; --device cpu runs the model on the CPU, and --plan --plan-gpu plans for a GPU "
            "that is not here"
        )
    reasons.append(f"device cpu: {problem}")
    return "cpu"


def _gpu_problem(machine: Machine) -> str:
    """Why the model can't run on the first GPU, or ""."""
    if not machine.gpus:
        return machine.gpu_problem or "no GPU was found"
    if not _is_supported(machine.gpus[0]):
        return (
            f"{machine.gpus[0].name} has compute capability {machine.gpus[0].capability}, but sm_{_OLDEST} (Ampere) or "
            "newer is needed (CUDA_VISIBLE_DEVICES says which GPUs there are for a program)"
        )
    if machine.triton_problem:
        return f"its kernels need the package triton, which can't be had: {machine.triton_problem}"
    return ""


def _heads_problem(arch: ModelArch) -> str:
    """Why GPU kernels can't compute this model's attention, or ""."""
    if arch.head_dim % HEAD_STEP or arch.head_dim > LARGEST_HEAD:
        return (
            f"this model's heads have {arch.head_dim} dimensions, and GPU kernels take multiples of {HEAD_STEP} up to "
            f"{LARGEST_HEAD}"
        )
    return ""


def _is_supported(gpu: Gpu) -> bool:
    vendor, _, number = gpu.capability.partition("_")
    if vendor == "sm" and number.isdigit():
        return int(number) >= _OLDEST
    return gpu.capability.startswith(("gfx94", "gfx95"))  # CDNA 3 and 4


def kernels(config: Config, arch: ModelArch, device: str, machine: Machine, reasons: list[str]) -> Kernels:
    if device == "cuda":
        return "triton"
    asked = config.worker.kernels
    if asked == "triton":
        if problem := _heads_problem(arch):
            raise ConfigError(f"--kernels triton: {problem}; use --kernels native")
        if machine.triton_problem:
            raise ConfigError(
                f"--kernels triton: needs the package triton, which can't be had: {machine.triton_problem}"
            )
        reasons.append(
            "kernels triton: on a CPU they are interpreted, which is very slow: for tests and debugging only"
        )
    if asked != "auto":
        return asked
    if machine.native_kernels:
        reasons.append("kernels native: they are compiled for this CPU")
        return "native"
    reasons.append(f"kernels torch, many times slower: compiled ones can't be had: {machine.kernels_problem}")
    return "torch"


def check_quantization(config: Config, kernels: Kernels) -> None:
    if kernels == "torch" and config.model.quantization in ("int8", "int4"):
        raise ConfigError(
            f"--quantization {config.model.quantization}: plain torch operations multiply no integers; it needs the "
            "compiled kernels (--kernels native) or a GPU"
        )


def dtype(config: Config, device: str, kernels: Kernels, machine: Machine, reasons: list[str]) -> str:
    asked = config.model.dtype
    if asked != "auto":
        if device == "cuda" and asked == "float32":
            raise ConfigError("--dtype float32: GPU kernels compute in bfloat16 or float16; sums are float32 anyway")
        return asked
    if device == "cuda":
        reasons.append("dtype bfloat16: 16 bits for the tensor cores, and the range of float32")
        return "bfloat16"
    if kernels == "triton":
        reasons.append("dtype float32: under the interpreter less gains nothing")
        return "float32"
    if machine.has_bfloat16:
        reasons.append("dtype bfloat16: this CPU multiplies it in hardware")
        return "bfloat16"
    reasons.append("dtype float32: this CPU has no bfloat16 instructions, without which bfloat16 is slower")
    return "float32"


def kv_dtype(config: Config, dtype: str, kernels: Kernels, machine: Machine, reasons: list[str]) -> str:
    asked = config.model.kv_dtype
    if kernels == "triton":
        if asked not in ("auto", dtype, "int8", "fp8"):
            raise ConfigError(
                f"--kv-dtype {asked}: GPU kernels keep keys and values in the dtype they compute in, {dtype}, or as "
                "fp8 or int8"
            )
        return dtype if asked == "auto" else asked
    if asked == "fp8":
        raise ConfigError("--kv-dtype fp8: only GPU kernels have it; on a CPU int8 takes as little memory")
    if kernels == "torch":
        if asked not in ("auto", dtype):
            raise ConfigError(
                f"--kv-dtype {asked}: plain torch operations keep keys and values in the dtype they compute in, "
                f"{dtype}; another one needs compiled kernels{_why_not_native(config, machine)}"
            )
        return dtype
    if asked != "auto":
        return asked
    reasons.append("kv_dtype float16: half of what float32 takes, to 3 decimal digits")
    return "float16"


def threads(config: Config, device: str, machine: Machine, reasons: list[str]) -> int:
    """CPU threads of each rank."""
    asked, tp = config.worker.threads, config.worker.tp
    if asked is not None:
        return asked
    share = max(1, machine.cores // tp)
    if device == "cuda":
        count = min(share, _GPU_THREADS)
        reasons.append(f"threads {count}: to load the weights; the model runs on the GPU")
        return count
    reasons.append(f"threads {share}: {machine.cores} physical cores for {tp} rank{'s' if tp > 1 else ''}")
    return share


def rank_cpus(
    config: Config, threads: int, kernels: Kernels, machine: Machine, reasons: list[str]
) -> tuple[tuple[int, ...], ...]:
    """For --pin-threads, a CPU for each compute thread of each rank; neighbouring cores for each rank."""
    if not config.worker.pin_threads:
        return ()
    if kernels == "triton":
        raise ConfigError("--pin-threads: only threads of compiled CPU kernels can be bound to cores")
    if kernels == "torch":
        raise ConfigError(
            "--pin-threads: only threads of compiled kernels can be bound to cores, not plain torch's"
            + _why_not_native(config, machine)
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


def _why_not_native(config: Config, machine: Machine) -> str:
    """What to say behind the words that there are no compiled kernels."""
    if config.worker.kernels == "torch":
        return " (--kernels torch asks for none)"
    return f", which can't be had: {machine.kernels_problem}"


def deterministic(config: Config, device: str, reasons: list[str]) -> bool:
    asked = config.worker.deterministic
    if asked is None and device == "cuda":
        reasons.append("deterministic off: a GPU's fastest kernels depend on the batch; --deterministic takes others")
    return device == "cpu" if asked is None else asked


def max_graph_seqs(config: Config, device: str, max_seqs: int) -> int:
    """The largest decode batch with a CUDA graph, 0 for none."""
    asked, graphs = config.worker.max_graph_seqs, config.worker.cuda_graphs
    if device == "cpu" and config.worker.kernels == "triton":
        return min(max_seqs, asked or 0)  # imitated, to debug what depends on them
    if device == "cpu":
        if graphs or asked:
            flag = "--cuda-graphs" if graphs else f"--max-graph-seqs {asked}"
            raise ConfigError(f"{flag}: there are CUDA graphs with --device cuda only")
        return 0
    if graphs is False:
        if asked:
            raise ConfigError(f"--max-graph-seqs {asked}: does not go with --no-cuda-graphs")
        return 0
    if graphs and asked == 0:
        raise ConfigError("--max-graph-seqs 0: does not go with --cuda-graphs")
    return min(max_seqs, _MAX_GRAPH_SEQS if asked is None else asked)
