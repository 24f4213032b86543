"""The batch-invariant matrix product against float64, and a row's bits in batches of all sizes."""

import json
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu import tables
from kernels.gpu.launch import TARGETS
from kernels.gpu.matmul import LENGTH_UNIT, matmul, segment_length, workspace_bytes
from kernels.gpu.tables import choose, entries, trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.rows import apart, assert_within, normal

SEEDS = st.integers(0, 1 << 30)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SEVERAL_SEGMENTS = (70, 530)  # (N, K)


def assert_right(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Against float64: K additions in float32 (Higham 2002, section 3.1), where hardware may cut off instead of
    rounding, and the rounding of the result."""
    terms = x.double(), weight.double(), None if bias is None else bias.double()
    magnitude = reference.linear(*(None if each is None else each.abs() for each in terms))
    assert_within(actual, reference.linear(*terms), (x.shape[1] + 2) * 2**-23 * magnitude)


@settings(max_examples=16)
@given(
    seed=SEEDS,
    m=st.integers(1, 100),
    n=st.integers(1, 150),
    k=st.integers(1, 400),
    dtype=DTYPES,
    wide=st.booleans(),
    biased=st.booleans(),
)
@example(seed=1, m=1, n=SEVERAL_SEGMENTS[0], k=SEVERAL_SEGMENTS[1], dtype=torch.bfloat16, wide=False, biased=True)
@example(seed=2, m=200, n=SEVERAL_SEGMENTS[0], k=SEVERAL_SEGMENTS[1], dtype=torch.bfloat16, wide=True, biased=True)
@example(seed=3, m=64, n=128, k=1024, dtype=torch.float16, wide=True, biased=False)
def test_products_are_right(seed: int, m: int, n: int, k: int, dtype: torch.dtype, wide: bool, biased: bool) -> None:
    x, weight = apart(normal(seed, m, k, dtype=dtype), 7), apart(normal(seed + 1, n, k, dtype=dtype), 3)
    bias = normal(seed + 2, n, dtype=dtype) if biased else None
    out_dtype = torch.float32 if wide else dtype
    around = poisoned(m, n + 3, dtype=out_dtype)
    assert matmul(x, weight, bias, out=around[:, :n]).data_ptr() == around.data_ptr()
    assert_right(around[:, :n], x, weight, bias)
    assert around[:, n:].isnan().all()
    assert torch.equal(matmul(x, weight, bias, out_dtype=out_dtype), around[:, :n])


@settings(max_examples=6)
@given(seed=SEEDS, m=st.integers(1, 300), dtype=st.sampled_from([torch.bfloat16, torch.float32]), data=st.data())
@example(seed=1, m=300, dtype=torch.bfloat16, data=None)
@example(seed=2, m=193, dtype=torch.float32, data=None)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(
    seed: int, m: int, dtype: torch.dtype, data: Any
) -> None:
    n, k = SEVERAL_SEGMENTS
    assert k > segment_length(n, k)
    x, weight = normal(seed, m, k, dtype=dtype), normal(seed + 1, n, k, dtype=dtype)
    bias = normal(seed + 2, n, dtype=dtype)
    together = matmul(x, weight, bias, out_dtype=torch.float32)
    rows = [0, m // 2, m - 1] if data is None else data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=3))
    for row in rows:
        assert torch.equal(matmul(x[row : row + 1], weight, bias, out_dtype=torch.float32)[0], together[row])
    others = torch.randperm(m, generator=torch.Generator().manual_seed(seed))[: m // 3 + 1].to(DEVICE)
    assert torch.equal(matmul(x[others], weight, bias, out_dtype=torch.float32), together[others])


def test_segments_give_the_same_bits_in_one_program_and_in_several() -> None:
    n, k = 70, 1100
    assert k > 2 * segment_length(n, k)  # whose order matters
    x, weight = normal(1, 70, k, dtype=torch.bfloat16), normal(2, n, k, dtype=torch.bfloat16)
    shipped = choose("matmul", m=70, n=n, k=k, kind="float16")
    results = []
    for split in (False, True):
        with trying({**shipped, "SPLIT": split}):
            assert (workspace_bytes(70, n, k, x.dtype) > 0) == split
            results.append(matmul(x, weight, out_dtype=torch.float32))
    assert torch.equal(*results)


def test_a_workspace_of_the_size_that_is_asked_for_is_enough() -> None:
    n, k = SEVERAL_SEGMENTS
    x, weight = normal(1, 3, k, dtype=torch.bfloat16), normal(2, n, k, dtype=torch.bfloat16)
    size = workspace_bytes(3, n, k, x.dtype)
    memory = poisoned(size // 4 + 5, dtype=torch.float32)
    out = matmul(x, weight, workspace=memory[: size // 4].view(torch.uint8))
    assert torch.equal(out, matmul(x, weight))
    assert memory[size // 4 :].isnan().all()
    assert not memory[: size // 4].isnan().any()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("tile", [(16, 64, 128), (32, 16, 32), (64, 32, 64)], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_other_tiles_are_right_too(tile: tuple[int, int, int], swap: bool, group: int) -> None:
    x, weight, bias = (
        normal(seed, *shape, dtype=torch.float32) for seed, shape in enumerate([(75, 300), (70, 300), (70,)])
    )
    block_m, block_n, block_k = tile
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group, "SWAP": swap}
    with trying({**blocks, "SPLIT": True, "num_warps": 4, "num_stages": 2}):
        assert_right(matmul(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("architecture", TARGETS)
def test_unmeasured_tables_have_one_tile_for_all_rows(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda: architecture)
    for entry in entries(architecture)["matmul"]:
        assert LENGTH_UNIT % entry["use"]["BLOCK_K"] == 0
    if json.loads((tables.FOLDER / architecture / "matmul.json").read_text())["measured"]:
        return
    for kind in ("float16", "float32", "float8", "blocks"):
        for n in (576, 2048, 4096, 28672, 128256):
            shapes = [choose("matmul", m=m, n=n, k=4096, kind=kind) for m in (1, 2, 16, 64, 200, 500, 1000, 1 << 16)]
            assert len({json.dumps({**use, "SPLIT": None}) for use in shapes}) == 1


@pytest.mark.parametrize("architecture", TARGETS)
def test_each_table_says_what_a_linear_is_computed_by(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda: architecture)
    assert choose("linear", m=1, n=4096, k=4096)["implementation"] in ("cublas", "triton")
