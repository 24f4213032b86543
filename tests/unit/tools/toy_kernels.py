"""A small family of kernels to try the tools with: one that is right, and others that each do one thing wrong."""

import os

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch
from tools.gpu_kernels.case import Case, Prepared


@triton.jit
def _scale(x, out, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * FACTOR, mask=at < count)


@triton.jit
def _broken(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.arange(0, 2 * BLOCK))


def scaled(x: torch.Tensor, factor: int, written: int, block: int = 256) -> torch.Tensor:
    """The first `written` values of x times `factor`; the rest of what it returns is left as it was."""
    out = torch.empty_like(x)
    launch(_scale, (cdiv(written, block),), x, out, written, FACTOR=factor, BLOCK=block)
    return out


def broken(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(_broken, (1,), x, out, BLOCK=256)
    return out


def _case(name: str, factor: int = 2, short: int = 0, kernel: str = "toy_scale", block: int = 256) -> Case:
    def prepare(device: torch.device, seed: int) -> Prepared:
        x = torch.randn(1000, device=device)
        return Prepared(
            launch=lambda: scaled(x, factor, 1000 - short, block), expected=lambda: (x.double() * 2).cpu().to(device)
        )

    return Case(kernel, name, {"count": 1000}, prepare, num_bytes=8000)


def _prepare_broken(device: torch.device, seed: int) -> Prepared:
    x = torch.zeros(256, device=device)
    return Prepared(lambda: broken(x), lambda: x)


def _prepare_deadly(device: torch.device, seed: int) -> Prepared:
    os.abort()


def cases() -> list[Case]:
    return [
        _case("right"),
        _case("right, and the same code"),
        _case("in larger blocks", block=1024),
        _case("wrong factor", factor=3, kernel="toy_wrong"),
        _case("the last value not written", short=1, kernel="toy_wrong"),
        Case("toy_broken", "shapes that don't fit", {}, _prepare_broken, num_bytes=1),
        Case("toy_deadly", "ends its process", {}, _prepare_deadly, num_bytes=1),
        _case("after the deadly one", kernel="toy_deadly"),
    ]
