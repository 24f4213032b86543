"""A small family of kernels to try the tools with: one that is right, and others that each do one thing wrong."""

import os

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import TARGETS, cdiv, launch
from kernels.gpu.tables import choose, entries
from tools.gpu_kernels.case import Case, Prepared

TABLE = {
    "toy_scale": [
        {"when": {"count": [0, 2000]}, "use": {"BLOCK": 256}},
        {"when": {"count": [2001, 3000]}, "use": {"BLOCK": 128}},
        {"use": {"BLOCK": 1024}},
    ],
    "toy_broken": [{"use": {"BLOCK": 256}}],
}


@triton.jit
def _scale(x, out, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * FACTOR, mask=at < count)


@triton.jit
def _broken(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.arange(0, 2 * BLOCK))


def scaled(x: torch.Tensor, factor: int, written: int) -> torch.Tensor:
    """The first `written` values of x times `factor`; the rest of what it returns is left as it was."""
    out = torch.empty_like(x)
    settings = choose("toy_scale", count=len(x))
    launch(_scale, (cdiv(written, settings["BLOCK"]),), x, out, written, FACTOR=factor, **settings)
    return out


def broken(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(_broken, (1,), x, out, **choose("toy_broken"))
    return out


def _case(name: str, count: int = 1000, factor: int = 2, short: int = 0) -> Case:
    def prepare(device: torch.device, seed: int) -> Prepared:
        x = torch.randn(count, device=device)
        return Prepared(lambda: scaled(x, factor, count - short), lambda: x.double() * 2)

    return Case("toy_scale", name, {"count": count}, prepare, 8 * count, candidates=({"BLOCK": 64}, {"BLOCK": 512}))


def _prepare_broken(device: torch.device, seed: int) -> Prepared:
    x = torch.zeros(256, device=device)
    return Prepared(lambda: broken(x), lambda: x)


def _prepare_deadly(device: torch.device, seed: int) -> Prepared:
    os.abort()


def cases() -> list[Case]:
    """Beside them, a table for all architectures is put in this process: `forget_table` in tests ends that."""
    for architecture in TARGETS:
        shared = entries(architecture)
        assert isinstance(shared, dict)
        shared.update(TABLE)
    return [
        _case("right"),
        _case("right, with larger blocks", count=5000),
        _case("wrong factor", factor=3),
        _case("the last value not written", short=1),
        Case("toy_broken", "shapes that don't fit", {}, _prepare_broken, 2048),
        Case("toy_deadly", "ends its process", {}, _prepare_deadly, 1),
        Case("toy_deadly", "after that", {}, _case("", 999).prepare, 1),
    ]
