"""Decode attention over a paged pool against the oracle, and that a row's bits depend on nothing but its sequence."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu import decode_attention as module
from kernels.gpu.decode_attention import decode_attention, workspace_size
from kernels.gpu.launch import launch
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.paged import ROUNDING, Batch, make_batch

SETTINGS = {"TILE": 16, "RESIDENT": 3, "MERGED": 4, "num_warps": 4, "num_stages": 2}
DTYPES = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few positions make many splits: of 32 in float32 at head dimension 32, and longer ones from 16 of them on."""
    monkeypatch.setattr(module, "SPLIT_BYTES", 1 << 12)
    monkeypatch.setattr(module, "SPLITS_OF_HEADS", 16)


def decode(batch: Batch, lens: list[int], queries: int, **changes: object) -> torch.Tensor:
    """`batch` has the queries at positions from 0 on; the others' rows are NaN, and must come out as zeros."""
    rows = query_rows(lens, queries)
    q = torch.full((len(lens) * queries, *batch.q.shape[1:]), torch.nan, dtype=batch.q.dtype, device=DEVICE)
    q[rows] = batch.q
    out = poisoned(*q.shape, dtype=q.dtype)
    arguments = {
        "max_context": max(lens),
        "scale": batch.scale,
        "window": batch.window,
        "soft_cap": batch.soft_cap,
        "k_scales": batch.k_scales,
        "v_scales": batch.v_scales,
        "workspace": poisoned(1 << 20, dtype=torch.float32),
    }
    arguments |= changes
    decode_attention(
        q, batch.k_pool, batch.v_pool, batch.block_tables, batch.context_lens, queries=queries, out=out, **arguments
    )
    unowned = torch.ones(len(q), dtype=torch.bool)
    unowned[rows] = False
    assert not out[unowned.to(DEVICE)].any()
    return out[rows]


def worst_error(batch: Batch, actual: torch.Tensor) -> float:
    """The largest error as a part of what is allowed; infinite with a NaN.

    Allowed are a rounding of each weight, which is float16 with 8-bit pools, one of the result, and float32's errors in
    scores and sums, as in `Batch.worst_error`. Besides, no weight in float16 is nearer than 2^-25 of the largest one:
    that matters in columns where the keys with large weights have a V near 0.
    """
    weights = torch.float16 if batch.k_pool.dtype.itemsize == 1 else batch.q.dtype
    allowed = (ROUNDING[weights] + ROUNDING[batch.q.dtype] + 2.0**-14) * batch.magnitude
    if weights == torch.float16:
        allowed += 2.0**-22 * int(batch.context_lens.max()) * batch.magnitude.amax(-1, keepdim=True)
    error = (actual.double().cpu() - batch.expected).abs() / allowed.clamp(min=1e-30)
    return float(error.max()) if not error.isnan().any() else float("inf")


def query_rows(lens: list[int], queries: int) -> list[int]:
    """The rows of q of queries at positions from 0 on."""
    return [i * queries + j for i, context in enumerate(lens) for j in range(queries) if context - queries + j >= 0]


def batch_of(seed: int, lens: list[int], queries: int, **shape: object) -> Batch:
    return make_batch(seed, [min(queries, context) for context in lens], lens, **shape)


@settings(max_examples=15)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    dtype, kv_dtype = data.draw(st.sampled_from(DTYPES))
    queries = data.draw(st.sampled_from([1, 1, 2, 5, 8]))
    groups = data.draw(st.sampled_from([1, 2]))
    lens = data.draw(st.lists(st.sampled_from([0, 1, 3, 17, 64, 100, 129, 300]), min_size=1, max_size=4).filter(any))
    batch = batch_of(
        data.draw(st.integers(0, 2**20)),
        lens,
        queries,
        num_heads=groups * data.draw(st.sampled_from([1, 3, 4, 9])),
        num_groups=groups,
        head_dim=data.draw(st.sampled_from([16, 32, 48, 64])),
        block_size=data.draw(st.sampled_from([1, 8, 16, 24, 64, 100])),
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=data.draw(st.sampled_from([0, 0, 1, 20, 70])),
        soft_cap=data.draw(st.sampled_from([0.0, 0.0, 2.0])),
    )
    with trying(SETTINGS | {"TILE": data.draw(st.sampled_from([16, 32])), "RESIDENT": data.draw(st.integers(1, 9))}):
        assert worst_error(batch, decode(batch, lens, queries)) < 1


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("block_size", [3, 12, 24, 48, 100])
def test_blocks_that_tiles_do_not_divide_into(block_size: int, window: int) -> None:
    """Shorter and longer than a tile, which then reaches from the middle of one block into the middle of another."""
    lens = [290, 129]
    shape = {"num_heads": 4, "num_groups": 2, "head_dim": 32, "dtype": torch.bfloat16, "kv_dtype": torch.int8}
    batch = batch_of(8, lens, 2, block_size=block_size, window=window, **shape)
    with trying(SETTINGS | {"TILE": 32}):
        assert worst_error(batch, decode(batch, lens, 2)) < 1


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, torch.float8_e4m3fn)])
def test_head_dimensions(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPLIT_BYTES", 1 << 15)
    lens = [150, 9]
    batch = batch_of(1, lens, 1, num_heads=2, num_groups=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    with trying(SETTINGS):
        assert worst_error(batch, decode(batch, lens, 1)) < 1


def test_shipped_settings_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose rows take several programs, and more splits than are merged at a time."""
    monkeypatch.undo()
    lens = [2500, 600, 0]
    shape = {"num_heads": 20, "num_groups": 1, "head_dim": 64, "dtype": torch.bfloat16}
    batch = batch_of(2, lens, 4, **shape)
    assert worst_error(batch, decode(batch, lens, 4)) < 1


@pytest.mark.parametrize(("dtype", "kv_dtype"), [DTYPES[2], DTYPES[3], DTYPES[6]])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Nor on the bound of contexts, on padding rows, and on how many programs there are."""
    lens = [0, 290, 33, 100, 1, 700]
    shape = {"num_heads": 6, "num_groups": 2, "head_dim": 32, "dtype": dtype, "kv_dtype": kv_dtype, "window": 150}
    batch = batch_of(3, lens, 2, **shape)
    with trying(SETTINGS):
        together = decode(batch, lens, 2)
    rows = query_rows(lens, 2)
    for index, resident in ((1, 1), (2, 7), (5, 2)):
        own = slice(rows.index(2 * index), rows.index(2 * index) + 2)
        alone = Batch(
            batch.q[own], batch.k_pool, batch.v_pool, batch.k_scales, batch.v_scales,
            batch.block_tables[index : index + 1], batch.query_starts, batch.context_lens[index : index + 1],
            batch.scale, batch.window, batch.soft_cap, batch.expected[own], batch.magnitude[own],
        )  # fmt: skip
        with trying(SETTINGS | {"RESIDENT": resident}):
            assert torch.equal(decode(alone, lens[index : index + 1], 2, max_context=1000 * index), together[own])


def test_strided_queries_and_pools() -> None:
    """q is a part of rows that hold q, k and v; K and V are interleaved block by block."""
    lens = [90, 40]
    batch = batch_of(4, lens, 1, num_heads=4, num_groups=2, head_dim=32, dtype=torch.float16, kv_dtype=torch.int8)
    qkv = poisoned(2, 8, 32, dtype=torch.float16)
    qkv[:, :4] = batch.q
    pools = torch.stack([batch.k_pool, batch.v_pool], dim=1)
    with trying(SETTINGS):
        out = decode_attention(
            qkv[:, :4], pools[:, 0], pools[:, 1], batch.block_tables, batch.context_lens,
            max_context=90, scale=batch.scale, k_scales=batch.k_scales, v_scales=batch.v_scales,
        )  # fmt: skip
    assert worst_error(batch, out) < 1


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_scales_of_v_beyond_the_range_of_float16(factor: float) -> None:
    lens = [200]
    batch = batch_of(5, lens, 1, num_heads=2, num_groups=1, head_dim=32, dtype=torch.bfloat16, kv_dtype=torch.int8)
    batch.v_scales.mul_(factor)
    with trying(SETTINGS):
        out = decode(batch, lens, 1)
    assert worst_error(batch, out.double() / factor) < 1


def test_scales_of_zero_and_none_at_all() -> None:
    lens = [100, 30]
    batch = batch_of(6, lens, 1, num_heads=2, num_groups=1, head_dim=32, dtype=torch.float16, kv_dtype=torch.int8)
    with trying(SETTINGS):
        assert not decode(batch, lens, 1, v_scales=batch.v_scales * 0).any()
        ones = torch.where(batch.k_scales.isnan(), batch.k_scales, 1.0)
        scaled = decode(batch, lens, 1, scale=1e-3, k_scales=ones, v_scales=ones)
        unscaled = decode(batch, lens, 1, scale=1e-3, k_scales=None, v_scales=None)
    assert torch.equal(scaled, unscaled)


def test_the_workspace_is_as_large_as_said() -> None:
    lens = [300, 40]
    batch = batch_of(7, lens, 2, num_heads=4, num_groups=2, head_dim=32)
    size = workspace_size(2, 4, 32, 300, num_kv_heads=2, kv_dtype=torch.float32, queries=2)
    around = poisoned(size + 64, dtype=torch.float32)
    with trying(SETTINGS):
        assert worst_error(batch, decode(batch, lens, 2, workspace=around[:size])) < 1
        with pytest.raises(ValueError, match="workspace"):
            decode(batch, lens, 2, workspace=around[: size - 1])
        assert worst_error(batch, decode(batch, lens, 2, workspace=None)) < 1
    assert around[size:].isnan().all()
    assert workspace_size(2, 4, 32, 32, num_kv_heads=2, kv_dtype=torch.float32) == 0


@triton.jit
def _plan(contexts, sizes, counts, SIZE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    at = tl.arange(0, SIZE)
    size, _, _, count = module._splits_of(tl.load(contexts + at), 0, 1, SPLIT, MOST_SPLITS, False)
    tl.store(sizes + at, size)
    tl.store(counts + at, count)


@pytest.mark.parametrize("num_kv_heads", [1, 5, 8, 64])
def test_splits_are_as_few_and_as_long_as_said(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    contexts = torch.cat([torch.arange(0, 1024), torch.randint(1024, 1 << 20, (3072,))]).int().to(DEVICE)
    sizes, counts = (poisoned(len(contexts), dtype=torch.int32) for _ in range(2))
    shortest, most = module._shortest_split(128, torch.bfloat16), module._most_splits(num_kv_heads)
    launch(_plan, (1,), contexts, sizes, counts, SIZE=len(contexts), SPLIT=shortest, MOST_SPLITS=most)
    assert shortest == 256
    assert 16 <= most <= 128
    for context, size, count in zip(contexts.tolist(), sizes.tolist(), counts.tolist(), strict=True):
        assert size % shortest == 0
        assert size == shortest or (size - shortest) * most < context  # no longer than it must be
        assert (count - 1) * size < max(context, 1) <= count * size
        assert count <= module._max_splits(max(context, 1), shortest, num_kv_heads) <= most
