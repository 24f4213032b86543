"""How Triton kernels are started: on a GPU, under Triton's interpreter, or compiled only.

`TRITON_INTERPRET=1`, set before triton is imported, has them run on the CPU with numpy: slow, and for tests. Compiling
needs neither GPU nor data: what a kernel's wrapper would start with tensors on the "meta" device is compiled.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

INTERPRETED = bool(knobs.runtime.interpret)
if INTERPRETED:
    from kernels.gpu.interpreter import convert_as_devices, divide_as_devices, multiply_as_devices

    convert_as_devices()
    divide_as_devices()
    multiply_as_devices()

# Architecture (the name of a table of settings) -> what Triton compiles for. sm_86 stands for all consumer cards, whose
# blocks have 99 KiB of shared memory; threads in a warp is the last number.
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Bytes of shared memory that one thread block may have (CUDA C++ Programming Guide, technical specifications of each
# compute capability; LDS in AMD's CDNA 3 instruction set reference).
SHARED_MEMORY = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}

_INTERPRETED_AS = "sm_90"  # whose settings are used under the interpreter


@dataclass(slots=True, frozen=True)
class Compilation:
    """One kernel as it was compiled for a target."""

    kernel: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    registers: int  # of a thread; of gfx942 those of the vector unit
    spilled_bytes: int  # of a thread, written to or read from memory for want of registers
    shared_bytes: int  # of a thread block
    hash: str = ""  # of the source, the types of the arguments and all options


@dataclass(slots=True)
class _Compiling:
    architecture: str
    found: list[Compilation] = field(default_factory=list)


_compiling: ContextVar[_Compiling | None] = ContextVar("compiling", default=None)
_counted: dict[str, tuple[int, int]] = {}  # hash of what was compiled -> its registers and spilled bytes


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Start `kernel`, of `grid` programs, on the current stream.

    `fp_fusion`: a product and a sum may become one operation that rounds once. Triton's default changes with versions.
    """
    compiling = _compiling.get()
    if compiling is None:
        if 0 not in grid:
            kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fp_fusion, **constants)
        return
    compiled = kernel.run(
        *args,
        grid=grid,
        warmup=True,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=fp_fusion,
        **constants,
    )
    if compiled.hash not in _counted:
        _counted[compiled.hash] = _registers(compiled.asm, compiling.architecture)
    found = Compilation(
        kernel.fn.__name__,
        constants,
        num_warps,
        num_stages,
        *_counted[compiled.hash],
        compiled.metadata.shared,
        compiled.hash,
    )
    compiling.found.append(found)


@contextmanager
def compiling(architecture: str) -> Iterator[list[Compilation]]:
    """What is launched inside is compiled for `architecture` and not run; the list grows with each launch.

    Not under the interpreter. Raises what Triton raises when a kernel can't be compiled.
    """
    if INTERPRETED:
        raise RuntimeError("kernels can't be compiled where TRITON_INTERPRET is set")
    state = _Compiling(architecture)
    before = driver._active
    driver.set_active(_NoDevice(TARGETS[architecture], list(TARGETS).index(architecture)))
    token = _compiling.set(state)
    try:
        yield state.found
    finally:
        _compiling.reset(token)
        driver._active = before


class _NoDevice:
    """As much of a driver as compiling takes. Triton keeps what it compiled by device number."""

    def __init__(self, target: GPUTarget, number: int) -> None:
        self._target = target
        self._number = 1000 + number

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def _registers(asm: dict[str, Any], architecture: str) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills)."""
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        used = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        # Memory of a thread. Scalar registers are spilled to vector registers, which is not counted.
        spilled = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
        return used, spilled
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", asm["ptx"], re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(asm["ptx"])
        command = [get_ptxas(TARGETS[architecture].arch).path, "-v", f"--gpu-name={target}", source, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = int(re.search(r"Used (\d+) registers", said)[1])
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups()
    return used, max(int(stores), int(loads))


def cache_folder() -> Path:
    """Where Triton keeps what it compiles."""
    return Path(knobs.cache.dir)


def architecture() -> str:
    """The name of the table of settings for the current device, or for what is being compiled."""
    compiling = _compiling.get()
    if compiling is not None:
        return compiling.architecture
    return _INTERPRETED_AS if INTERPRETED else _device_architecture(torch.cuda.current_device())


def _device_architecture(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0]
    if name:
        return name if name in TARGETS else "gfx942"
    if (properties.major, properties.minor) in ((8, 0), (8, 7)):
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(properties.major, "sm_86")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
