"""The oracle itself, in float64, against torch and transformers."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels import reference

EXAMPLES = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 1 << 30)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@EXAMPLES
@given(seed=SEEDS, rows=st.integers(1, 9), width=st.integers(1, 130), eps=st.sampled_from([1e-6, 1e-5, 0.1]))
def test_norms(seed: int, rows: int, width: int, eps: float) -> None:
    x, residual, weight = normal(seed, rows, width), normal(seed + 1, rows, width), normal(seed + 2, width)
    close(reference.rms_norm(x, weight, eps), F.rms_norm(x, (width,), weight, eps))
    normed, total = reference.add_rms_norm(x, residual, weight, eps)
    close(total, x + residual)
    close(normed, F.rms_norm(x + residual, (width,), weight, eps))


@EXAMPLES
@given(seed=SEEDS, rows=st.integers(1, 9), features=st.integers(1, 40), width=st.integers(1, 40), bias=st.booleans())
def test_linear(seed: int, rows: int, features: int, width: int, bias: bool) -> None:
    x, weight = normal(seed, rows, width), normal(seed + 1, features, width)
    offset = normal(seed + 2, features) if bias else None
    close(reference.linear(x, weight, offset), F.linear(x, weight, offset))


@EXAMPLES
@given(
    seed=SEEDS, rows=st.integers(1, 9), features=st.integers(1, 300), width=st.integers(1, 300), in_blocks=st.booleans()
)
def test_scaled_linear(seed: int, rows: int, features: int, width: int, in_blocks: bool) -> None:
    x, weight = ((normal(seed + i, size, width) * 40).to(torch.int8) for i, size in enumerate((rows, features)))
    x_scales, weight_scales, bias = normal(seed + 2, rows, 3), normal(seed + 3, 3, 3), normal(seed + 4, features)
    blocks, row_blocks = torch.arange(width) // 128, torch.arange(features) // 128
    if in_blocks:
        scaled = x_scales[:, blocks], weight_scales[row_blocks[:, None], blocks]
        x_scales, weight_scales = x_scales[:, : blocks[-1] + 1], weight_scales[: row_blocks[-1] + 1, : blocks[-1] + 1]
    else:
        x_scales, weight_scales = normal(seed + 2, rows), normal(seed + 3, features)
        scaled = x_scales[:, None], weight_scales[:, None]
    expected = F.linear(x.double() * scaled[0], weight.double() * scaled[1], bias)
    actual = reference.scaled_linear(x, x_scales, weight, weight_scales, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-8)  # sums of up to millions cancel out


@EXAMPLES
@given(seed=SEEDS, rows=st.integers(1, 9), width=st.integers(1, 40), scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_gated_activations(seed: int, rows: int, width: int, scale: float) -> None:
    gate_up = normal(seed, rows, 2 * width) * scale
    gate, up = gate_up[:, :width], gate_up[:, width:]
    close(reference.gated_activation(gate_up, "silu"), F.silu(gate) * up)
    close(reference.gated_activation(gate_up, "gelu"), F.gelu(gate, approximate="tanh") * up)


def test_what_is_not_an_activation_or_a_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'relu' is not one of silu, gelu"):
        reference.gated_activation(torch.zeros(1, 2), "relu")
    with pytest.raises(ValueError, match="rope type 'longrope' is not one of default"):
        reference.rope_frequencies(64, 1e4, "longrope", original_max_position=64)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_tables_and_rotation(rope: dict[str, object], head_dim: int) -> None:
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    positions = torch.arange(256)
    q, k = normal(0, 256, 4, head_dim), normal(1, 256, 2, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(q.float(), positions[None])
    kind, factor = str(rope["rope_type"]), float(str(rope.get("factor", 1.0)))
    original = rope.get("original_max_position_embeddings")
    frequencies, scale = reference.rope_frequencies(
        head_dim, 10000.0, kind, factor=factor, original_max_position=int(str(original)) if original else None
    )
    our_cos, our_sin = reference.rope_tables(frequencies, scale, 256)
    # Frequencies that differ by one unit in the last place turn 255 positions by up to 3e-5 further.
    for ours, theirs in ((our_cos, cos[0]), (our_sin, sin[0])):
        torch.testing.assert_close(ours.repeat(1, 2), theirs, rtol=0, atol=5e-5)
    cos, sin = our_cos.double(), our_sin.double()
    rotated = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    )
    for tensor, theirs in zip((q, k), rotated, strict=True):
        close(reference.apply_rope(tensor, cos, sin), theirs[0].transpose(0, 1))


@EXAMPLES
@given(
    seed=SEEDS,
    groups=st.integers(1, 3),
    repeats=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 20]),
    block_size=st.sampled_from([1, 3, 16]),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=4),
    window=st.integers(0, 70),
)
def test_paged_attention(
    seed: int, groups: int, repeats: int, head_dim: int, block_size: int, lengths: list[tuple[int, int]], window: int
) -> None:
    """`lengths`: new and cached positions of each sequence; blocks are dealt in random order, unused entries wild."""
    rng = random.Random(seed)
    heads = groups * repeats
    contexts = [new + cached for new, cached in lengths]
    counts = [-(-context // block_size) for context in contexts]
    blocks = rng.sample(range(sum(counts) + 3), sum(counts))
    tables = torch.full((len(lengths), max(counts)), 1 << 30, dtype=torch.int32)
    pools = [normal(seed + i, (sum(counts) + 3) * block_size, groups, head_dim) for i in range(2)]
    starts, queries, expected = [0], [], []
    for index, ((new, cached), context, count) in enumerate(zip(lengths, contexts, counts, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        tables[index, :count] = torch.tensor(own, dtype=torch.int32)
        q, k, v = (
            normal(seed + 10 * index + i, n, h, head_dim)
            for i, (n, h) in enumerate([(new, heads), (context, groups), (context, groups)], start=2)
        )
        for position in range(context):
            slot = own[position // block_size] * block_size + position % block_size
            pools[0][slot], pools[1][slot] = k[position], v[position]
        mask = torch.ones(new, context, dtype=torch.bool).tril(cached)
        if window:
            mask = mask.triu(cached - window + 1)
        k, v = (x.transpose(0, 1).repeat_interleave(repeats, dim=0) for x in (k, v))
        expected.append(F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1))
        queries.append(q)
        starts.append(starts[-1] + new)
    actual = reference.paged_attention(torch.cat(queries), *pools, tables, block_size, starts, contexts, window)
    close(actual, torch.cat(expected))
