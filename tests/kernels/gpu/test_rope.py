"""Rotation and the write to the KV pool against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu.rope import rope_and_write
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.rows import INSIDE, QUANTIZED, ROUNDING, apart, assert_quantized, bits, normal
from tools.gpu_kernels.checking import relative_error

NUM_BLOCKS = 5
POSITIONS = 50
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (12, 2), (5, 5)])  # query, KV
HEAD_DIMS = [6, 20, 64, 80, 96, 128, 256]
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_max_position": 16, "max_length": POSITIONS},
    "yarn": {"factor": 4.0, "original_max_position": 16, "beta_fast": 4.0},
    "llama3": {"factor": 8.0, "original_max_position": 32},
}


def tables(head_dim: int, kind: str = "default") -> tuple[torch.Tensor, torch.Tensor]:
    frequencies, scale = reference.rope_frequencies(head_dim, 100.0, kind, **SCALINGS[kind])
    cos, sin = reference.rope_tables(frequencies, scale, POSITIONS)
    return cos.to(DEVICE), sin.to(DEVICE)


class Pools:
    """K, V and their scales, poisoned, in layouts of two kinds: each for itself, or with K beside V in each block."""

    def __init__(self, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, together: bool) -> None:
        shape = (kv_heads, block_size, head_dim)
        both = poisoned(NUM_BLOCKS, 2, *shape, dtype=torch.uint8 if dtype in QUANTIZED else dtype)
        if dtype in QUANTIZED:
            both = both.view(dtype)
        scales = poisoned(NUM_BLOCKS, 2, *shape[:2], dtype=torch.float32)
        if not together:
            both, scales = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (both, scales))
        self.k, self.v = both.unbind(1)
        self.k_scales, self.v_scales = scales.unbind(1) if dtype in QUANTIZED else (None, None)
        self.block_size = block_size

    def write(self, qkv: torch.Tensor, positions: list[int], slots: list[int], heads: int, **more: Any) -> torch.Tensor:
        cos, sin = more.pop("tables", None) or tables(self.k.shape[-1])
        return rope_and_write(
            qkv,
            torch.tensor(positions, device=DEVICE),
            torch.tensor(slots, device=DEVICE),
            cos,
            sin,
            self.k,
            self.v,
            heads,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            **more,
        )

    def rows(self, pool: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """[slots, G, ...] of a pool or of scales."""
        blocks, offsets = [slot // self.block_size for slot in slots], [slot % self.block_size for slot in slots]
        return pool.transpose(1, 2)[blocks, offsets]

    def others_are_untouched(self, slots: list[int]) -> bool:
        others = [slot for slot in range(NUM_BLOCKS * self.block_size) if slot not in slots]
        parts = [pool for pool in (self.k, self.v, self.k_scales, self.v_scales) if pool is not None]
        for part in parts:
            found = bits(self.rows(part, others))
            before = poisoned(*part.shape, dtype=torch.uint8 if part.dtype in QUANTIZED else part.dtype)
            if not torch.equal(found, bits(self.rows(before, others))):
                return False
        return True


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy's, of zeros beyond the heads
@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    heads=HEADS,
    head_dim=st.sampled_from(HEAD_DIMS),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(list(ROUNDING)),
    pool_dtype=st.sampled_from([*ROUNDING, *QUANTIZED]),
    kind=st.sampled_from(list(SCALINGS)),
    together=st.booleans(),
    small_tiles=st.booleans(),
    data=st.data(),
)
def test_rotation_and_write(
    seed: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    kind: str,
    together: bool,
    small_tiles: bool,
    data: st.DataObject,
) -> None:
    num_heads, kv_heads = heads
    all_slots = range(NUM_BLOCKS * block_size)
    slots = data.draw(st.lists(st.sampled_from(all_slots), min_size=1, max_size=4, unique=True))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 2))))
    tokens = len(slots)
    positions = data.draw(st.lists(st.integers(0, POSITIONS - 1), min_size=tokens, max_size=tokens))
    qkv = apart(normal(seed, tokens, (num_heads + 2 * kv_heads) * head_dim, dtype=dtype), 8)
    q_out = apart(poisoned(tokens, num_heads, head_dim, dtype=dtype), 5)
    pools = Pools(kv_heads, block_size, head_dim, pool_dtype, together)
    cos, sin = tables(head_dim, kind)
    options = {"q_out": q_out, "tables": (cos, sin)}
    if small_tiles:
        with trying({"HEADS": 2, "num_warps": 1}):
            pools.write(qkv, positions, slots, num_heads, **options)
    else:
        pools.write(qkv, positions, slots, num_heads, **options)

    split = qkv.double().view(tokens, -1, head_dim).split([num_heads, kv_heads, kv_heads], dim=1)
    token_cos, token_sin = cos[positions].double(), sin[positions].double()
    q, k = (reference.apply_rope(part, token_cos, token_sin) for part in split[:2])
    assert relative_error(q_out, q) <= ROUNDING[dtype] + INSIDE
    written = [index for index, slot in enumerate(slots) if slot >= 0]
    real_slots = [slots[index] for index in written]
    for expected, pool, scales in ((k, pools.k, pools.k_scales), (split[2], pools.v, pools.v_scales)):
        found = pools.rows(pool, real_slots)
        if scales is not None:
            # Rotation in float32 moves the largest number a little: the expected values are those of a float32 kernel.
            assert_quantized(found, pools.rows(scales, real_slots), expected[written].float().double())
        else:
            assert relative_error(found, expected[written]) <= ROUNDING[pool_dtype] + INSIDE
    assert pools.others_are_untouched(real_slots)


@pytest.mark.parametrize("kind", list(SCALINGS))
def test_rotation_is_that_of_the_cpu_backend_to_the_bit(kind: str) -> None:
    qkv = normal(3, 7, 4 * 64)
    positions = [0, 1, 7, 12, 31, 48, 49]
    pools = Pools(1, 16, 64, torch.float32, together=False)
    cos, sin = tables(64, kind)
    q = pools.write(qkv, positions, list(range(20, 27)), 2, tables=(cos, sin))
    expected = reference.apply_rope(qkv.view(7, 4, 64)[:, :3], cos[positions], sin[positions])
    assert torch.equal(q, expected[:, :2])
    assert torch.equal(pools.rows(pools.k, list(range(20, 27))), expected[:, 2:])
    assert torch.equal(pools.rows(pools.v, list(range(20, 27))), qkv.view(7, 4, 64)[:, 3:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of divisions by zero
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_scales_of_zeros_and_of_what_is_no_number(dtype: torch.dtype) -> None:
    qkv = normal(3, 2, 5 * 20)
    heads = qkv.view(2, 5, 20)
    heads[0, 1] = 0  # key head 0 of token 0
    heads[0, 2, 3] = torch.nan
    heads[1, 3, 19] = torch.nan  # value head 0 of token 1
    heads[1, 4, 10] = torch.inf
    pools = Pools(2, 4, 20, dtype, together=True)
    pools.write(qkv, [3, 4], [9, 2], 1)
    k_scales, v_scales = pools.rows(pools.k_scales, [9, 2]), pools.rows(pools.v_scales, [9, 2])
    assert k_scales[0, 0] == 0
    assert not pools.rows(pools.k, [9])[0, 0].double().any()
    assert k_scales[0, 1].isnan()
    assert k_scales[1].isfinite().all()
    assert v_scales[0].isfinite().all()
    assert v_scales[1, 0].isnan()
    assert v_scales[1, 1] == torch.inf


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    qkv = normal(5, 6, 6 * 64, dtype=torch.bfloat16)
    positions, slots = [4, 5, 6, 0, 1, 30], [0, 1, 2, 40, 41, 75]
    batch, alone = (Pools(2, 16, 64, torch.float8_e4m3fn, together=True) for _ in range(2))
    q = batch.write(qkv, positions, slots, 2)
    for index, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        assert torch.equal(alone.write(qkv[index : index + 1], [position], [slot], 2)[0], q[index])
    assert torch.equal(bits(alone.k), bits(batch.k))
    assert torch.equal(bits(alone.v), bits(batch.v))
    assert torch.equal(alone.rows(alone.k_scales, slots), batch.rows(batch.k_scales, slots))
    assert torch.equal(alone.rows(alone.v_scales, slots), batch.rows(batch.v_scales, slots))
