"""Rows quantized to 8 bits: the output of attention, which in these models is as wide as the hidden states."""

import torch

from kernels.gpu.quantize import quantize_rows
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import (
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
    found = [_case(LLAMA_8B.name, LLAMA_8B.hidden, tokens, dtype) for dtype in QUANTIZED for tokens in TOKENS]
    found += [_case(model.name, model.hidden, 4096, torch.int8) for model in MODELS[1:]]
    return [*found, _case("Llama-3.1-405B", WIDEST, 4096, torch.int8)]


def _case(name: str, width: int, tokens: int, dtype: torch.dtype) -> Case:

    def prepare(device: torch.device, seed: int) -> Prepared:
        x = normal(device, seed, tokens, width)
        codes = torch.empty(tokens, width, dtype=dtype, device=device)
        scales = torch.empty(tokens, device=device)
        return Prepared(
            lambda: quantize_rows(x, dtype, codes=codes, scales=scales),
            lambda: by_rows(lambda rows: codes_and_scales(rows, dtype), x),
        )

    return Case(
        kernel="quantize_rows",
        name=f"{str(dtype)[6:]}, {name} {width}, {tokens} tokens",
        shape={"width": width},
        prepare=prepare,
        num_bytes=tokens * (width * 3 + 4),
        tolerance=tolerance(dtype),
        candidates=whole_row_candidates(width),
    )
