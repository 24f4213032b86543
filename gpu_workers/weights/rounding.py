"""Float weights into integers, when they are loaded: round to nearest, with scales searched for each group of 32.

With 8 bits a group's largest value becomes 127. With 4 bits a group has a scale and a minimum. The range that its 16
levels span is tried in several widths, for clipping a rare large value may cost less than coarser steps for all others;
for the codes of each width the scale and minimum of least squares are taken, and of all the one with the least squared
error. No activations are looked at (compare GPTQ, Frantar et al. 2022, and AWQ, Lin et al. 2023, which do).
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_workers.weights.quantized import GROUP, QuantizedWeight

_WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of the range of 4-bit levels, as a share of the group's own
_CHUNK = 1 << 18  # elements that a thread rounds at once: its cache is to hold them and what is made of them


def can_round(shape: tuple[int, ...], start: int = 0) -> bool:
    """Whether a tensor, or a matrix's part from its input `start` on, is a matrix of whole groups."""
    return len(shape) == 2 and shape[1] % GROUP == 0 and start % GROUP == 0


def rounded(weight: torch.Tensor, bits: int, threads: int = 1) -> QuantizedWeight:
    """[N, K] floats as integers of 4 or 8 `bits`, made by `threads` threads; ValueError where it has NaN or infinity.

    Scales and minimums are float16 numbers, which is what the kernels hold.
    """
    rows, inputs = weight.shape
    at_once = max(1, _CHUNK // inputs)

    def chunk(begin: int) -> _Parts:
        values = weight[begin : begin + at_once].float()
        values = values.reshape(values.shape[0], inputs // GROUP, GROUP)
        if not values.isfinite().all():
            raise ValueError("it has values that are not finite numbers")
        return _to_8_bits(values) if bits == 8 else _to_4_bits(values)

    begins = range(0, max(rows, 1), at_once)  # of no rows, too, there is a chunk: it has the dtypes
    if threads > 1 and len(begins) > 1:
        # Not torch's own threads: the backends on CPUs leave it only one.
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(chunk, begins))
    else:
        parts = [chunk(begin) for begin in begins]
    codes, scales, minimums = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedWeight(bits, codes.view(rows, inputs), scales, minimums if bits == 4 else None)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes [N, G, 32], scales [N, G], minimums [N, G]


def _to_8_bits(values: torch.Tensor) -> _Parts:
    scales = _float16(values.abs().amax(dim=-1) / 127)
    codes = _divided(values, scales).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales, torch.zeros_like(scales)


def _to_4_bits(values: torch.Tensor) -> _Parts:
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    best = _with_levels(values, (high - low) / 15, low)
    best_error = _squared_error(values, best)
    for width in _WIDTHS:
        middle, half = (low + high) / 2, (high - low) / 2 * width
        codes, _, _ = _with_levels(values, half / 7.5, middle - half)
        found = _with_levels(values, *_least_squares(values, codes.float()))
        error = _squared_error(values, found)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best = (
            torch.where(is_better[..., None], found[0], best[0]),
            torch.where(is_better, found[1], best[1]),
            torch.where(is_better, found[2], best[2]),
        )
    return best


def _with_levels(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> _Parts:
    scales, minimums = _float16(scales), _float16(minimums)
    codes = _divided(values - minimums[..., None], scales).round_().clamp_(0, 15).to(torch.uint8)
    return codes, scales, minimums


def _least_squares(values: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each group for which code * scale + minimum is closest to the values."""
    mean_code, mean_value = codes.mean(dim=-1), values.mean(dim=-1)
    spread = codes - mean_code[..., None]
    variance = spread.square().sum(dim=-1)
    covariance = (spread * values).sum(dim=-1)
    scales = torch.where(variance > 0, covariance / variance.clamp(min=1e-30), torch.zeros_like(variance))
    return scales, mean_value - scales * mean_code


def _squared_error(values: torch.Tensor, parts: _Parts) -> torch.Tensor:
    codes, scales, minimums = parts
    return (codes * scales[..., None] + minimums[..., None] - values).square().sum(dim=-1)


def _float16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.half().float()


def _divided(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """0 where the scale is 0: then all of the group is the minimum, or 0."""
    return torch.where(scales[..., None] > 0, values / scales[..., None], torch.zeros_like(values))
