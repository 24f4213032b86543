"""Products with integer weights on the linears of three models and on squares, against cuBLAS with bfloat16 weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from kernels import reference
from kernels.gpu.pack import WORD, PackedIntegers, pack_integers, packed_shapes, unit_groups
from kernels.gpu.weight_only import dequantize, weight_only_matmul
from tools.gpu_kernels.case import Case, Prepared

_ROWS = (1, 16, 64, 256, 2048)
_ROWS_BETWEEN = (32, 128)

# (N, K); the output projection of Llama-3.1-8B is the smaller square.
_SQUARES = {"4096 square": (4096, 4096), "8192 square": (8192, 8192)}
_LINEARS = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Qwen2.5-1.5B qkv": (2048, 1536),
    "Qwen2.5-1.5B o": (1536, 1536),
    "Qwen2.5-1.5B gate_up": (17920, 1536),
    "Qwen2.5-1.5B down": (1536, 8960),
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M o": (576, 576),
    "SmolLM2-135M gate_up": (3072, 576),
    "SmolLM2-135M down": (576, 1536),
}
_WIDE = {"Llama-3.1-8B up": (14336, 4096), "Llama-3.1-8B gate_up": (28672, 4096)}
_MOST_IN_FLOAT64 = 1 << 27  # weights; of more, the expected product is float32: float64 would take over 1 GiB


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    bits: int
    group: int
    offsets: str = ""

    def num_bytes(self, n: int, k: int) -> float:
        """Codes, and 2 bytes for each scale and offset: what a checkpoint has."""
        return n * k * (self.bits / 8 + (4 if self.offsets else 2) / self.group)

    def shape(self, n: int, k: int) -> dict[str, int | str]:
        return {"n": n, "k": k, "group": self.group, "bits": self.bits}


_SYMMETRIC = _Format("int4 by 128", 4, 128)
_GGUF = _Format("Q4_0", 4, 32)
_OTHERS = (
    _Format("AWQ by 128", 4, 128, "zeros"),
    _Format("AWQ by 64", 4, 64, "zeros"),
    _GGUF,
    _Format("Q4_1", 4, 32, "minimums"),
    _Format("Q8_0", 8, 32),
    _Format("int8 by 128", 8, 128),
)


def cases() -> list[Case]:
    """Groups of 128 on all shapes where inputs come in whole groups, of 32 on the others; all formats on a square.

    Further rows and widths are there so that each entry of a table has a case.
    """
    found = []
    for name, (n, k) in {**_SQUARES, **_LINEARS}.items():
        form = _SYMMETRIC if k % 128 == 0 else _GGUF
        found += [_product(name, form, rows, n, k) for rows in _ROWS]
    for name, (n, k) in {**_SQUARES, **_WIDE}.items():
        found += [_product(name, _SYMMETRIC, rows, n, k) for rows in _ROWS_BETWEEN]
        found.append(_product(name, _SYMMETRIC, 64, n, k, deterministic=True))
    found.append(_product("Llama-3.1-8B up", _SYMMETRIC, 64, *_WIDE["Llama-3.1-8B up"]))
    n, k = _SQUARES["4096 square"]
    for form in _OTHERS:
        found += [_product("4096 square", form, rows, n, k) for rows in (1, 64, 2048)]
    found += [_product("4096 square", _SYMMETRIC, rows, n, k, deterministic=True) for rows in (1, 2048)]
    found += [_dequantization(form, n, k) for form in (_SYMMETRIC, *_OTHERS)]
    return found


def _product(name: str, form: _Format, rows: int, n: int, k: int, deterministic: bool = False) -> Case:
    shape = form.shape(n, k)

    def prepare(device: torch.device, seed: int) -> Prepared:
        weight, numbers = _weight(form, n, k, device, seed)
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=_generator(device, seed + 1))
        out = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
        wide = torch.float64 if n * k <= _MOST_IN_FLOAT64 else torch.float32

        @cache
        def rival_weight() -> torch.Tensor:
            return dequantize(weight, torch.bfloat16).t()

        return Prepared(
            launch=lambda: weight_only_matmul(x, weight, deterministic=deterministic, out=out),
            expected=None if numbers is None else lambda: reference.linear(x.to(wide), numbers.dequantize(wide)),
            rival=(lambda: torch.matmul(x, rival_weight())) if device.type == "cuda" else None,
        )

    return Case(
        kernel="weight_only_deterministic" if deterministic else "weight_only",
        name=f"{name}, {form.name}, M {rows}",
        shape=shape if deterministic else {"m": rows, **shape},
        prepare=prepare,
        num_bytes=form.num_bytes(n, k) + 2 * rows * (n + k),
        operations=2 * rows * n * k,
        rival="cuBLAS bfloat16",
        candidates=_DETERMINISTIC if deterministic else _candidates(rows),
    )


def _dequantization(form: _Format, n: int, k: int) -> Case:
    def prepare(device: torch.device, seed: int) -> Prepared:
        weight, numbers = _weight(form, n, k, device, seed)
        out = torch.empty(n, k, device=device, dtype=torch.bfloat16)
        return Prepared(
            launch=lambda: dequantize(weight, torch.bfloat16, out),
            expected=None if numbers is None else lambda: numbers.dequantize(torch.float64),
        )

    return Case(
        kernel="weight_only_dequantize",
        name=f"{n} square, {form.name}",
        shape=form.shape(n, k),
        prepare=prepare,
        num_bytes=form.num_bytes(n, k) + 2 * n * k,
        hot=False,
        candidates=tuple(
            {"BLOCK_N": rows, "num_warps": warps, "num_stages": 2} for rows in (16, 32, 64, 128) for warps in (2, 4, 8)
        ),
    )


def _tiles(
    block_n: int, block_m: int, slices: int = 1, split_k: int = 1, warps: int = 4, stages: int = 4
) -> Mapping[str, int]:
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "SLICES": slices,
        "SPLIT_K": split_k,
        "num_warps": warps,
        "num_stages": stages,
    }


def _candidates(rows: int) -> tuple[Mapping[str, int], ...]:
    """A slice a warp for few rows, else wide tiles; splits as long as there is little to add up."""
    if rows <= 16:
        return tuple(
            _tiles(block_n, 8 if rows <= 8 else 16, slices, split_k, slices, stages)
            for block_n in (16, 32, 64)
            for slices in (4, 8)
            for split_k in (1, 2)
            for stages in (3, 4)
        )
    if rows <= 256:
        return tuple(
            _tiles(block_n, block_m, 1, split_k, warps, stages)
            for block_n, warps in ((64, 4), (128, 4), (128, 8))
            for block_m in (64, 128)
            for split_k in (1, 2, 4, 8)
            for stages in (3, 4)
            if block_m <= max(64, rows) and (block_m == 64 or warps == 8)
        )
    return tuple(
        _tiles(block_n, block_m, 1, 1, warps, stages)
        for block_n, block_m, warps in ((64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
        for stages in (2, 3, 4)
    )


_DETERMINISTIC = tuple(
    _tiles(block_n, 64, 1, split_k, 4, stages) for block_n in (64, 128) for split_k in (1, 2, 4, 8) for stages in (3, 4)
)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What `pack_integers` was given."""

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        minimums = None if self.minimums is None else self.minimums.to(dtype)
        return reference.dequantize(self.codes.to(dtype), self.scales.to(dtype), minimums)


def _weight(form: _Format, n: int, k: int, device: torch.device, seed: int) -> tuple[PackedIntegers, _Numbers | None]:
    """A random weight in the format, and its integers; of "meta", its shape only."""
    if device.type == "meta":
        codes, words = packed_shapes(form.bits, n, k, form.group)
        groups = unit_groups(form.bits, k, form.group)
        scales = torch.empty(words, dtype=WORD[groups], device=device)
        weight = PackedIntegers(
            bits=form.bits,
            n=n,
            k=k,
            group=form.group,
            codes=torch.empty(codes, dtype=torch.int16, device=device),
            group_dtype=torch.float16,
            scales=scales,
            offsets=form.offsets,
            offset_words=scales if form.offsets and groups > 1 else None,
            zero=8 if form.bits == 4 and not form.offsets else 0,
        )
        return weight, None
    generator = _generator(device, seed)
    low, high, dtype = (0, 16, torch.uint8) if form.bits == 4 else (-128, 128, torch.int8)
    numbers = torch.randint(low, high, (n, k), generator=generator, dtype=dtype, device=device)
    groups = -(-k // form.group)
    by_group = (torch.rand(n, groups, generator=generator, device=device) + 0.5).mul(0.01).half().float()
    minimums = None
    if form.offsets == "zeros":
        minimums = -torch.randint(1, 16, (n, groups), generator=generator, device=device) * by_group
    elif form.offsets == "minimums":
        minimums = torch.randn(n, groups, generator=generator, device=device).mul(0.05).half().float()
    elif form.bits == 4:
        minimums = -8 * by_group
    repeats = form.group // 32
    of_32 = by_group.repeat_interleave(repeats, dim=1)[:, : k // 32].contiguous()
    minimums_of_32 = None if minimums is None else minimums.repeat_interleave(repeats, dim=1)[:, : k // 32].contiguous()
    weight = pack_integers(numbers, of_32, minimums_of_32, form.group, torch.bfloat16, device)
    return weight, _Numbers(numbers, of_32, minimums_of_32)


def _generator(device: torch.device, seed: int) -> torch.Generator | None:
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
