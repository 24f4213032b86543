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


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` of 8-bit x [T, K] and weight [N, K] times their scales, in the dtype of those.

    Scales are [T] and [N]; or [T, ceil(K / 128)] and [ceil(N / 128), ceil(K / 128)], for blocks of 128.
    """
    dtype = x_scales.dtype
    if x_scales.dim() == 1:
        x_scales, weight_scales = x_scales[:, None], weight_scales[:, None]
    else:
        width = x.shape[1]
        x_scales = x_scales.repeat_interleave(128, 1)[:, :width]
        weight_scales = weight_scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, :width]
    return linear(x.to(dtype) * x_scales, weight.to(dtype) * weight_scales, bias)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x); kind "silu" (Elfwing et al. 2018), "gelu" (Hendrycks & Gimpel 2016, tanh form) or "none"."""
    if kind == "silu":
        return x / (1 + torch.exp(-x))
    if kind == "gelu":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    if kind == "none":
        return x
    raise ValueError(f"activation {kind!r} is not one of silu, gelu, none")


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: act(first half) * second half; see `activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate, kind) * up


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
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over pools [slots, G, D] -> [T, H, D], scaled by `scale`, or 1 / sqrt(D).

    Sequence i owns the flat queries query_starts[i]:query_starts[i + 1], which are the last of its context_lens[i]
    positions; position p lies in slot block_tables[i, p // block_size] * block_size + p % block_size. With a sliding
    window (Jiang et al. 2023, Mistral 7B) the query at position p attends to the last `window` of the positions 0..p.
    With a soft cap (Gemma Team 2024, Gemma 2) a scaled score s becomes soft_cap * tanh(s / soft_cap).
    """
    num_heads, head_dim = q.shape[1:]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    repeats = num_heads // k_pool.shape[1]
    outputs = torch.empty_like(q)
    for index, context in enumerate(context_lens):
        start, end = query_starts[index], query_starts[index + 1]
        positions = torch.arange(context)
        slots = block_tables[index].long()[positions // block_size] * block_size + positions % block_size
        k = k_pool[slots].repeat_interleave(repeats, dim=1)
        v = v_pool[slots].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(context - (end - start), context)
        behind = query_positions[:, None] - positions[None, :]
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        scores = scores.masked_fill(hidden, -math.inf)
        outputs[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return outputs


def sampling_weights(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """exp((logits - max) / temperature) of one row [V], zero outside top-k, then top-p, then min-p.

    top-p (Holtzman et al. 2020) keeps the fewest best tokens that have this share of what top-k kept; min-p (Nguyen et
    al. 2024) those with this share of the largest weight. Equals at the edge of a filter are all kept.
    """
    weights = torch.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights = weights.where(logits >= logits.topk(top_k).values[-1], 0.0)
    smallest = weights.max() * min_p
    if top_p < 1:
        best = weights.sort(descending=True).values
        mass = best.cumsum(0)
        count = int((mass < top_p * mass[-1]).sum())
        smallest = torch.maximum(smallest, best[min(count, len(best) - 1)])
    return weights.where(weights >= smallest, 0.0)


def draw(weights: torch.Tensor, uniform: float) -> int:
    """The first id of the weights [V] at which their running sum exceeds `uniform` times their total."""
    running = weights.cumsum(0)
    return int(torch.searchsorted(running, uniform * running[-1], right=True))
