"""Prefill attention over a paged pool against the oracle, and that a row's bits depend on nothing but its sequence."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.paged import Batch, make_batch

# Short sequences have several tiles and segments with these.
SMALL = {"BLOCK_M": 16, "TILE": 16, "SEGMENT": 32, "num_warps": 4, "num_stages": 2}

DTYPES = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float16, torch.int8),
    (torch.float32, torch.int8),
]


def attend(batch: Batch, q: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """What the kernel writes over poison; `options` are those of `prefill_attention`."""
    q = batch.q if q is None else q
    out = poisoned(*q.shape, dtype=q.dtype)
    arguments = {
        "block_tables": batch.block_tables,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "max_query_len": batch.max_query_len,
        "k_pool": batch.k_pool,
        "v_pool": batch.v_pool,
        **options,
    }
    returned = prefill_attention(
        q,
        scale=batch.scale,
        window=batch.window,
        soft_cap=batch.soft_cap,
        k_scales=batch.k_scales,
        v_scales=batch.v_scales,
        out=out,
        **arguments,
    )
    assert returned is out
    return out


@settings(max_examples=16)
@given(
    seed=st.integers(0, 2**30),
    # (new tokens, tokens before them) of each sequence
    lengths=st.lists(st.tuples(st.sampled_from([0, 1, 2, 7, 19]), st.integers(0, 75)), min_size=1, max_size=4).filter(
        lambda lengths: any(new for new, _ in lengths)
    ),
    num_groups=st.integers(1, 2),
    repeats=st.sampled_from([1, 3, 4, 20]),
    head_dim=st.sampled_from([16, 48, 64, 80]),
    block_size=st.sampled_from([1, 4, 16, 24, 64]),
    dtypes=st.sampled_from(DTYPES),
    scaled=st.booleans(),
    window=st.sampled_from([0, 0, 1, 9, 40]),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    deterministic=st.booleans(),
    split=st.booleans(),
)
def test_any_batch(
    seed: int,
    lengths: list[tuple[int, int]],
    num_groups: int,
    repeats: int,
    head_dim: int,
    block_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scaled: bool,
    window: int,
    soft_cap: float,
    deterministic: bool,
    split: bool,
) -> None:
    batch = make_batch(
        seed,
        [new for new, _ in lengths],
        [new + before for new, before in lengths],
        num_heads=num_groups * repeats,
        num_groups=num_groups,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        scaled=scaled,
        window=window,
        soft_cap=soft_cap,
    )
    with trying(SMALL):
        out = attend(batch, deterministic=deterministic, max_context=batch.max_context if split else 0)
    assert batch.worst_error(out) <= 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_settings_of_the_table(head_dim: int, deterministic: bool) -> None:
    """Several tiles of queries and of keys, a window that ends in the middle of them, and a decode row."""
    options = {"num_heads": 4, "num_groups": 1, "head_dim": head_dim, "dtype": torch.bfloat16, "window": 150}
    batch = make_batch(head_dim, [70, 1], [230, 200], **options)
    assert batch.worst_error(attend(batch, deterministic=deterministic)) <= 1


def test_more_sequences_than_are_looked_at_together() -> None:
    lengths = [0] * 300
    lengths[2], lengths[270], lengths[298] = 9, 1, 3
    batch = make_batch(1, lengths, [length + 2 for length in lengths], num_heads=2, num_groups=1, head_dim=16)
    with trying(SMALL):
        assert batch.worst_error(attend(batch)) <= 1


def test_views_of_wider_tensors_and_rows_of_nobody() -> None:
    batch = make_batch(3, [12, 5], [30, 5], num_heads=4, num_groups=2, head_dim=32)
    tokens, heads, head_dim = batch.q.shape
    qkv = poisoned(tokens + 3, heads + 4, head_dim, dtype=batch.q.dtype)
    qkv[:tokens, :heads] = batch.q
    pools = torch.stack([batch.k_pool, batch.v_pool], dim=1)
    tables = torch.cat([batch.block_tables, batch.block_tables], dim=1)[:, : batch.block_tables.shape[1]]
    with trying(SMALL):
        out = attend(batch, qkv[:, :heads], k_pool=pools[:, 0], v_pool=pools[:, 1], block_tables=tables)
    assert batch.worst_error(out[:tokens]) <= 1
    assert out[tokens:].isnan().all()


def test_head_dim_that_is_not_supported() -> None:
    batch = make_batch(1, [1], [1], num_heads=1, num_groups=1, head_dim=24)
    with pytest.raises(ValueError, match="head_dim 24"):
        attend(batch)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [(torch.bfloat16, torch.bfloat16, 0), (torch.float16, torch.float8_e4m3fn, 0), (torch.float32, torch.float32, 37)],
    ids=str,
)
def test_deterministic_rows_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, kv_dtype: torch.dtype, window: int
) -> None:
    """However prompts are chunked, decoded row by row, mixed with others and split by segments of keys."""
    lengths = [70, 40, 51]
    batch = make_batch(
        5, lengths, lengths, num_heads=3, num_groups=1, head_dim=32, dtype=dtype, kv_dtype=kv_dtype, window=window
    )
    with trying(SMALL):
        whole = attend(batch, deterministic=True)
        assert batch.worst_error(whole) <= 1
        for chunks in (
            [(0, 50, 70), (1, 39, 40), (2, 3, 9)],
            [(2, 50, 51), (0, 69, 70), (1, 0, 1), (2, 49, 50)],
            [(1, 20, 22), (0, 63, 65)],
        ):
            rows = torch.cat([batch.query_starts[i] + torch.arange(a, b, device=DEVICE) for i, a, b in chunks])
            starts = torch.tensor([0, *(b - a for _, a, b in chunks)], device=DEVICE).cumsum(0).int()
            for max_context in (0, 200):
                out = attend(
                    batch,
                    batch.q[rows],
                    block_tables=batch.block_tables[[i for i, _, _ in chunks]],
                    query_starts=starts,
                    context_lens=torch.tensor([b for _, _, b in chunks], device=DEVICE).int(),
                    max_query_len=max(b - a for _, a, b in chunks),
                    max_context=max_context,
                    deterministic=True,
                )
                assert torch.equal(out, whole[rows])
