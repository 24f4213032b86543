"""What is known of a machine: what the launcher found, or what a plan for another one is told."""

import msgspec
from msgspec import Struct

# Names in /proc/cpuinfo of the instructions with which the CPU backend multiplies bfloat16.
_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


class Gpu(Struct, frozen=True, kw_only=True):
    """One device, as its driver describes it."""

    name: str
    total_bytes: int
    free_bytes: int  # what the engine could get of them
    capability: str  # sm_90 and the like; of AMD's gfx942 and the like

    def sized(self, num_bytes: int) -> "Gpu":
        """One like it that has so much memory, all of it free."""
        return msgspec.structs.replace(self, total_bytes=num_bytes, free_bytes=num_bytes)


class Machine(Struct, frozen=True, kw_only=True):
    """What the launcher found; limits of a container are already applied."""

    cores: int  # physical cores this process may use
    memory_available: int  # bytes
    cpu_features: frozenset[str] = frozenset()
    gpus: tuple[Gpu, ...] = ()  # in the order in which ranks get them
    gpu_problem: str = ""  # why there are none
    gpu_software: str = ""  # what computes on them, with versions
    triton_problem: str = ""  # why Triton's kernels can't be had
    plans_elsewhere: bool = False  # the GPUs are no GPUs of this machine: only their memory is planned
    native_kernels: bool = False  # whether there are compiled ones
    kernels_problem: str = ""  # why not
    core_cpus: tuple[int, ...] = ()  # one CPU of each physical core; empty where threads can't be bound to CPUs

    @property
    def has_bfloat16(self) -> bool:
        return bool(self.cpu_features & _BFLOAT16_FEATURES)

    def on(self, gpu: Gpu) -> "Machine":
        """The same one with `gpu` alone."""
        return msgspec.structs.replace(self, gpus=(gpu,))
