"""RMSNorm in its four forms."""

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.gpu.norm import add_rms_norm, add_rms_norm_quantized, rms_norm, rms_norm_quantized
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import (
    EPS,
    LLAMA_8B,
    MODELS,
    QUANTIZED,
    TOKENS,
    WIDEST,
    by_rows,
    codes_and_scales,
    normal,
    tolerance,
    whole_row_candidates,
)


def cases() -> list[Case]:
    found = [_case(model.name, model.hidden, tokens, add=True) for model in MODELS for tokens in TOKENS]
    found += [_case(LLAMA_8B.name, LLAMA_8B.hidden, tokens, add=False) for tokens in TOKENS]
    for dtype in QUANTIZED:
        for add in (False, True):
            found += [_case(LLAMA_8B.name, LLAMA_8B.hidden, tokens, add, dtype) for tokens in (64, 4096)]
    found.append(_case(LLAMA_8B.name, LLAMA_8B.hidden, 4096, add=True, x_dtype=torch.float32))
    found.append(_case("Llama-3.1-405B", WIDEST, 4096, add=True))
    return found


def _case(
    name: str,
    hidden: int,
    tokens: int,
    add: bool,
    dtype: torch.dtype = torch.bfloat16,
    x_dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """`dtype` is that of the result, `x_dtype` that of the input beside a bfloat16 residual."""
    quantized = dtype in QUANTIZED

    def prepare(device: torch.device, seed: int) -> Prepared:
        x = normal(device, seed, tokens, hidden, dtype=x_dtype)
        residual = normal(device, seed + 1, tokens, hidden) if add else None
        weight = normal(device, seed + 2, hidden)
        out = torch.empty(tokens, hidden, dtype=dtype, device=device)
        scales = torch.empty(tokens, device=device)
        total = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)

        def launch() -> object:
            if residual is None:
                if quantized:
                    return rms_norm_quantized(x, weight, EPS, dtype, codes=out, scales=scales)
                return rms_norm(x, weight, EPS, out=out)
            if quantized:
                return add_rms_norm_quantized(x, residual, weight, EPS, dtype, codes=out, scales=scales, total=total)
            return add_rms_norm(x, residual, weight, EPS, out=out, total=total)

        def expected_rows(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            summed = sum(parts[1:], parts[0])
            normed = reference.rms_norm(summed, weight.double(), EPS)
            result = codes_and_scales(normed, dtype) if quantized else (normed,)
            return (*result, summed) if add else result

        def expected() -> object:
            result = by_rows(expected_rows, x, *(() if residual is None else (residual,)))
            return result if len(result) > 1 else result[0]

        def rival() -> object:
            summed = x if residual is None else x + residual
            return F.rms_norm(summed, (hidden,), weight, EPS), summed

        has_rival = device.type == "cuda" and not quantized and x_dtype == torch.bfloat16
        return Prepared(launch, expected, rival if has_rival else None)

    rows = tokens * hidden
    moved = rows * (x_dtype.itemsize + dtype.itemsize) + hidden * 2
    moved += rows * 4 if add else 0  # the residual in, the total out
    moved += tokens * 4 if quantized else 0
    kinds = [str(kind).removeprefix("torch.") for kind in (x_dtype, dtype)]
    form = "add, norm" if add else "norm"
    return Case(
        kernel="rms_norm",
        name=f"{form}, {kinds[0]} to {kinds[1]}, {name} {hidden}, {tokens} tokens",
        shape={"hidden": hidden},
        prepare=prepare,
        num_bytes=moved,
        rival="" if quantized or x_dtype == torch.float32 else "torch",
        tolerance=tolerance(dtype),
        candidates=whole_row_candidates(hidden),
    )
