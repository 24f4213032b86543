"""Integer weights as the kernels of `kernels.gpu.weight_only` read them: tiles of packed codes, scales by group.

A unit is 64 bytes of one row: 32 words of 16 bits, which hold as many inputs as there are codes in them (128 of 4 bits,
64 of 8). Bits 0.. of word i are the code of the unit's input i, the next ones of input 32 + i, and so on. So one mask
takes 32 consecutive inputs out of a unit, in order, in the lanes where a matrix instruction wants 16-bit operands. 16
rows of a unit are 1 KiB that follow one another, and the units of these rows do too: a program reads whole pages.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32  # inputs to which the scales that are packed belong; what groups are multiples of
WORDS = 32  # of a row in a unit
BLOCK_ROWS = 16

_CHUNK_ROWS = 4096  # packed at once: bounds the memory that packing takes
WORD = {1: torch.int32, 2: torch.int32, 4: torch.int64}  # for scales, by the groups in a unit


@dataclass(slots=True, frozen=True)
class PackedIntegers:
    """An [n, k] weight: value = (code - zero) * scale, or code * scale + minimum.

    Rows are filled up with zeros to a multiple of 16, inputs to whole units. Scales, and the zeros or minimums called
    offsets, are 16-bit floats in words: those of a unit with 4 or 2 groups, the first in the lowest bits; else a scale
    and its offset, for a group of one or more units.
    """

    bits: int  # 4 or 8
    n: int
    k: int
    group: int  # consecutive inputs with one scale: 32, 64, 128, or k or more for the whole row
    codes: torch.Tensor  # [row blocks, units, 16, 32] int16; codes of 4 bits are 0..15, those of 8 bits -128..127
    group_dtype: torch.dtype  # of what is in the words
    scales: torch.Tensor  # [units, or groups of at least one, rows] int64 (4 groups in a unit) or int32
    offsets: str  # what groups have beside a scale: "zeros", "minimums" or ""
    offset_words: torch.Tensor | None  # as scales, where units have 2 or 4 groups
    zero: int  # of all groups, unless `offsets` are zeros

    @property
    def units(self) -> int:
        return self.codes.shape[1]

    @property
    def unit_groups(self) -> int:
        """Groups in a unit, at least 1."""
        return unit_groups(self.bits, self.k, self.group)

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.offset_words) if t is not None)


def unit_inputs(bits: int) -> int:
    """Inputs in a unit."""
    return 16 // bits * WORDS


def unit_groups(bits: int, k: int, group: int) -> int:
    """Groups in a unit, at least 1."""
    return 1 if group >= k else max(1, unit_inputs(bits) // group)


def packed_shapes(bits: int, n: int, k: int, group: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shapes of `codes`, and of `scales` and `offset_words`."""
    row_blocks, units = -(-n // BLOCK_ROWS), -(-k // unit_inputs(bits))
    words = 1 if group >= k else -(-units // max(1, group // unit_inputs(bits)))
    return (row_blocks, units, BLOCK_ROWS, WORDS), (words, row_blocks * BLOCK_ROWS)


def largest_group(scales: torch.Tensor, minimums: torch.Tensor | None) -> int:
    """In how many consecutive inputs all rows have one scale and minimum: K, 128, 64 or 32.

    `scales` and `minimums` [N, K / 32], for each 32 inputs.
    """
    inputs = scales.shape[1] * GROUP
    for group in (inputs, 128, 64):
        if all(tensor is None or _repeats(tensor, group // GROUP) for tensor in (scales, minimums)):
            return group
    return GROUP


def _repeats(tensor: torch.Tensor, count: int) -> bool:
    """Whether columns are equal in runs of `count`; the last run may be shorter."""
    return torch.equal(tensor[:, ::count].repeat_interleave(count, dim=1)[:, : tensor.shape[1]], tensor)


def pack_integers(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedIntegers:
    """Pack value = code * scale + minimum, on `device`.

    codes [N, K]: uint8 0..15 with 4 bits, int8 -128..127 with 8 bits; scales and minimums [N, K / 32] float32; `group`
    as `largest_group` found it. Scales (and minimums that are no multiples of them) are kept in float16, which holds
    those of GGUF, GPTQ and AWQ as they are, else in `dtype`, that of activations (bfloat16 where these are float32).
    ValueError for what the kernels don't multiply.
    """
    bits = 8 if codes.dtype == torch.int8 else 4
    if bits == 8 and minimums is not None:
        raise ValueError("8-bit codes with minimums are not supported")
    n, k = codes.shape
    if k % GROUP or (group not in (32, 64, 128) and group < k):
        raise ValueError(f"{k} inputs in groups of {group} are not supported: 32, 64, 128 or all of a multiple of 32")
    step = min(group, k) // GROUP
    scales = scales[:, ::step].to(device)
    zero, kind, offsets = 0, "", None
    if minimums is not None:
        zero, kind, offsets = _offsets(scales, minimums[:, ::step].to(device))
    kept = torch.float16
    if not _fits(scales, kept) or (kind == "minimums" and not _fits(offsets, kept)):
        kept = torch.bfloat16 if dtype == torch.float32 else dtype
    _, shape = packed_shapes(bits, n, k, group)
    count = unit_groups(bits, k, group)
    numbers = [t if t is None else t.to(kept) for t in (scales, offsets)]
    if count == 1:
        numbers = [torch.stack([numbers[0], torch.zeros_like(numbers[0]) if kind == "" else numbers[1]], dim=2), None]
    return PackedIntegers(
        bits=bits,
        n=n,
        k=k,
        group=group,
        codes=_pack_codes(codes, bits, device),
        group_dtype=kept,
        scales=_words(numbers[0], shape, count),
        offsets=kind,
        offset_words=None if numbers[1] is None else _words(numbers[1], shape, count),
        zero=zero,
    )


def _offsets(scales: torch.Tensor, minimums: torch.Tensor) -> tuple[int, str, torch.Tensor | None]:
    """`zero`, `offsets` of `PackedIntegers`, and these: zeros where minimums are whole multiples of scales.

    One zero for all is looked for among 8 and 0 only, since each makes another kernel.
    """
    for zero in (8, 0):
        if torch.equal(minimums, -zero * scales):
            return zero, "", None
    zeros = (-minimums / scales).round().nan_to_num(0).clamp(0, 127)
    return (0, "zeros", zeros) if torch.equal(minimums, -zeros * scales) else (0, "minimums", minimums)


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _words(numbers: torch.Tensor, shape: tuple[int, int], count: int) -> torch.Tensor:
    """[N, groups] (or [N, groups, 2]) 16-bit numbers -> words [words, rows], filled up with zeros."""
    words, rows = shape
    numbers = numbers.flatten(1)
    filled = numbers.new_zeros(rows, words * max(count, 2))
    filled[: numbers.shape[0], : numbers.shape[1]] = numbers
    return filled.view(WORD[count]).t().contiguous()


def _pack_codes(codes: torch.Tensor, bits: int, device: torch.device) -> torch.Tensor:
    n, k = codes.shape
    shape, _ = packed_shapes(bits, n, k, k)
    parts, units = 16 // bits, shape[1]
    packed = torch.empty(shape, dtype=torch.int16, device=device)
    for start in range(0, n, _CHUNK_ROWS):
        chunk = codes[start : start + _CHUNK_ROWS].to(device)
        filled = F.pad(chunk, (0, units * unit_inputs(bits) - k, 0, -chunk.shape[0] % BLOCK_ROWS))
        # [row blocks, 16, units, parts, 32]
        split = filled.view(torch.uint8).view(-1, BLOCK_ROWS, units, parts, WORDS)
        words = torch.zeros_like(split[:, :, :, 0], dtype=torch.int16)
        for part in range(parts):
            words |= split[:, :, :, part].to(torch.int16) << (bits * part)
        first = start // BLOCK_ROWS
        packed[first : first + words.shape[0]] = words.transpose(1, 2)
    return packed
