"""Activations: with a bias, of gated MLPs, and those quantized."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.gpu.activation import bias_activation, gated_activation, gated_activation_quantized
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import (
    LLAMA_8B,
    MODELS,
    QUANTIZED,
    TOKENS,
    block_candidates,
    by_rows,
    codes_and_scales,
    normal,
    tolerance,
)

_LLAMA_70B = 28672
_RIVALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def cases() -> list[Case]:
    found = [_gated(model.name, model.intermediate, tokens) for model in MODELS for tokens in TOKENS]
    found.append(_gated(LLAMA_8B.name, LLAMA_8B.intermediate, 4096, kind="gelu", with_bias=True))
    found.append(_gated("Llama-3.1-70B", _LLAMA_70B, 4096))
    for dtype in QUANTIZED:
        found += [_gated(LLAMA_8B.name, LLAMA_8B.intermediate, tokens, dtype=dtype) for tokens in TOKENS]
        found += [_gated(model.name, model.intermediate, 4096, dtype=dtype) for model in MODELS[1:]]
        found += [_gated("Llama-3.1-70B", _LLAMA_70B // ranks, 4096, dtype=dtype) for ranks in (1, 4)]
    return found + [_biased(tokens) for tokens in TOKENS]


def _gated(
    name: str,
    width: int,
    tokens: int,
    kind: str = "silu",
    with_bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """`dtype` is that of the result."""
    quantized = dtype in QUANTIZED

    def prepare(device: torch.device, seed: int) -> Prepared:
        gate_up = normal(device, seed, tokens, 2 * width)
        bias = normal(device, seed + 1, 2 * width) if with_bias else None
        out = torch.empty(tokens, width, dtype=dtype, device=device)
        scales = torch.empty(tokens, device=device)

        def launch() -> object:
            if quantized:
                return gated_activation_quantized(gate_up, kind, dtype, bias=bias, codes=out, scales=scales)
            return gated_activation(gate_up, kind, bias=bias, out=out)

        def expected_rows(rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            gated = reference.gated_activation(rows if bias is None else rows + bias.double(), kind)
            return codes_and_scales(gated, dtype) if quantized else gated

        def expected() -> object:
            result = by_rows(expected_rows, gate_up)
            return result if quantized else result[0]

        def rival() -> object:
            gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, dim=-1)
            return _RIVALS[kind](gate) * up

        return Prepared(launch, expected, rival if device.type == "cuda" and not quantized else None)

    kernel = "gated_activation_quantized" if quantized else "gated_activation"
    blocks = (2048, 4096, 8192, 16384, 32768) if quantized else (512, 1024, 2048, 4096, 8192)
    return Case(
        kernel=kernel,
        name=f"{kind}{' with bias' if with_bias else ''}, {str(dtype)[6:]}, {name} {width}, {tokens} tokens",
        shape={"width": width},
        prepare=prepare,
        num_bytes=tokens * width * (4 + dtype.itemsize) + (tokens * 4 if quantized else 0) + 4 * width * with_bias,
        rival="" if quantized else "torch",
        tolerance=tolerance(dtype),
        candidates=block_candidates(width, blocks, (8, 32)),
    )


def _biased(tokens: int) -> Case:
    width = LLAMA_8B.intermediate

    def prepare(device: torch.device, seed: int) -> Prepared:
        x, bias = normal(device, seed, tokens, width), normal(device, seed + 1, width)
        out = torch.empty_like(x)

        def expected() -> torch.Tensor:
            return by_rows(lambda rows: reference.activation(rows + bias.double(), "gelu"), x)[0]

        rival = (lambda: _RIVALS["gelu"](x + bias)) if device.type == "cuda" else None
        return Prepared(lambda: bias_activation(x, bias, "gelu", out=out), expected, rival)

    return Case(
        kernel="bias_activation",
        name=f"gelu with bias, {LLAMA_8B.name} {width}, {tokens} tokens",
        shape={"width": width},
        prepare=prepare,
        num_bytes=tokens * width * 4 + width * 2,
        rival="torch",
        candidates=block_candidates(width, (512, 1024, 2048, 4096, 8192), (8, 32)),
    )
