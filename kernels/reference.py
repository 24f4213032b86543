"""The op set in plain torch: the oracle that every kernel and backend is tested against.

Written to be read, not to be fast; every op works in the dtype of its inputs, float64 included. Shapes: T tokens, H
query heads, G KV heads, D head dimension, N and K output and input features.
"""

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]."""
    y = x @ weight.transpose(0, 1)
    return y if bias is None else y + bias


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None, group: int = 32
) -> torch.Tensor:
    """Integers [N, K] as numbers: code * scale + minimum; scales and minimums [N, K / group], rounded up."""
    inputs = codes.shape[1]
    values = codes * scales.repeat_interleave(group, dim=1)[:, :inputs]
    return values if minimums is None else values + minimums.repeat_interleave(group, dim=1)[:, :inputs]


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: act(first half) * second half; kind "silu" or "gelu" (tanh form, Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "gelu":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    raise ValueError(f"activation {kind!r} is not one of silu, gelu")


def rope_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    original_max_position: int | None = None,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    max_length: int = 0,
) -> tuple[torch.Tensor, float]:
    """Angular frequencies [D / 2] in float32 (radians a position), and the factor by which cos and sin are multiplied.

    `kind`: "default" (Su et al. 2021), "linear" (Chen et al. 2023), "dynamic" (NTK-aware, for sequences up to
    `max_length`), "yarn" (Peng et al. 2023), "llama3" (Llama 3.1). Names and defaults are Hugging Face's.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if kind == "dynamic":
        assert original_max_position is not None
        length = max(max_length, original_max_position)
        stretch = factor * length / original_max_position - (factor - 1)
        return 1.0 / (theta * stretch ** (head_dim / (head_dim - 2))) ** exponents, 1.0
    frequencies = 1.0 / theta**exponents
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    assert original_max_position is not None
    if kind == "llama3":
        # turns over the original context: many -> as trained, few -> stretched, in between a blend
        turns = original_max_position * frequencies / (2 * math.pi)
        blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / factor, 1.0
    if kind == "yarn":

        def dimension_of(turns: float) -> float:
            return head_dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dimension_of(beta_fast)), 0)
        high = min(math.ceil(dimension_of(beta_slow)), head_dim - 1)
        span = max(high - low, 0.001)
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return frequencies / factor * stretched + frequencies * (1 - stretched), attention_factor
    raise ValueError(f"rope type {kind!r} is not one of default, linear, dynamic, yarn, llama3")


def rope_tables(frequencies: torch.Tensor, scale: float, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_positions, D / 2], multiplied by `scale`, in the dtype of `frequencies`."""
    positions = torch.arange(num_positions, dtype=frequencies.dtype)
    angles = torch.outer(positions, frequencies)
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D]; cos and sin [T, D / 2] are those of each token. Halves layout: i pairs with i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    query_starts: list[int],
    context_lens: list[int],
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over pools [slots, G, D] -> [T, H, D], scaled by 1 / sqrt(D).

    Sequence i owns the flat queries query_starts[i]:query_starts[i + 1], which are the last of its context_lens[i]
    positions; position p lies in slot block_tables[i, p // block_size] * block_size + p % block_size. With a sliding
    window (Jiang et al. 2023, Mistral 7B) the query at position p attends to the last `window` of the positions 0..p.
    """
    num_heads, head_dim = q.shape[1:]
    repeats = num_heads // k_pool.shape[1]
    outputs = torch.empty_like(q)
    for index, context in enumerate(context_lens):
        start, end = query_starts[index], query_starts[index + 1]
        positions = torch.arange(context)
        slots = block_tables[index].long()[positions // block_size] * block_size + positions % block_size
        k = k_pool[slots].repeat_interleave(repeats, dim=1)
        v = v_pool[slots].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k) / math.sqrt(head_dim)
        query_positions = torch.arange(context - (end - start), context)
        behind = query_positions[:, None] - positions[None, :]
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        scores = scores.masked_fill(hidden, -math.inf)
        outputs[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return outputs
