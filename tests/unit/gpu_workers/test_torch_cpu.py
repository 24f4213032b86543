"""The torch CPU backend: each op against the oracle, and rows that have the same bits in every company."""

import random
from collections.abc import Iterator

import pytest
import torch

from gpu_workers.backends.torch_cpu import TorchCpuBackend
from gpu_workers.batch import ForwardBatch
from kernels import reference

SHAPES = [(576, 576), (960, 576), (576, 1536), (131, 48), (37, 101)]


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_rows_have_the_same_bits_for_any_batch_and_threads(
    shape: tuple[int, int], dtype: torch.dtype, packed: bool
) -> None:
    backend = TorchCpuBackend(dtype, deterministic=True, packed=packed)
    torch.manual_seed(0)
    weight = backend.load_linear(torch.randn(shape), torch.randn(shape[0]))
    x = torch.randn(600, shape[1]).to(dtype)
    expected = backend.linear(x, weight)
    rng = random.Random(0)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in [*range(1, 14), 31, 32, 33, *rng.sample(range(14, 600), 6)]:
            chosen = torch.tensor(rng.sample(range(600), rows))
            assert torch.equal(backend.linear(x[chosen], weight), expected[chosen]), (threads, rows)
    assert backend.linear(x[:0], weight).shape == (0, shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [576, 1536, 101])
def test_row_ops_have_the_same_bits_for_any_batch_and_threads(width: int, dtype: torch.dtype) -> None:
    backend = TorchCpuBackend(dtype, deterministic=True)
    torch.manual_seed(0)
    x, residual, gate_up = (torch.randn(300, n).to(dtype) for n in (width, width, 2 * width))
    norm = backend.load_norm(torch.randn(width))

    def ops(rows: torch.Tensor) -> list[torch.Tensor]:
        return [
            backend.rms_norm(x[rows], norm, 1e-5),
            *backend.add_rms_norm(x[rows], residual[rows], norm, 1e-5),
            backend.gated_activation(gate_up[rows], "silu"),
            backend.gated_activation(gate_up[rows], "gelu"),
        ]

    expected = ops(torch.arange(300))
    rng = random.Random(0)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in [*range(1, 9), *rng.sample(range(9, 300), 6)]:
            chosen = torch.tensor(rng.sample(range(300), rows))
            for actual, whole in zip(ops(chosen), expected, strict=True):
                assert torch.equal(actual, whole[chosen]), (threads, rows)


@pytest.mark.parametrize("packed", [True, False])
def test_linear_and_row_ops_against_the_oracle(packed: bool) -> None:
    backend = TorchCpuBackend(torch.float32, deterministic=True, packed=packed)
    torch.manual_seed(0)
    x, residual, norm = torch.randn(9, 96), torch.randn(9, 96), torch.randn(96)
    weight, bias = torch.randn(50, 96), torch.randn(50)
    close = lambda actual, expected: torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)  # noqa: E731
    close(
        backend.linear(x, backend.load_linear(weight, bias)),
        reference.linear(x.double(), weight.double(), bias.double()),
    )
    close(backend.rms_norm(x, norm, 1e-5), reference.rms_norm(x.double(), norm.double(), 1e-5))
    actual = backend.add_rms_norm(x, residual, norm, 1e-5)
    for ours, oracle in zip(
        actual, reference.add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5), strict=True
    ):
        close(ours, oracle)
    for kind in ("silu", "gelu"):
        close(backend.gated_activation(x, kind), reference.gated_activation(x.double(), kind))


def test_bfloat16_products_are_those_of_rounded_weights() -> None:
    backend = TorchCpuBackend(torch.bfloat16, deterministic=True)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(50, 96)
    exact = x.double() @ weight.bfloat16().double().T
    logits = backend.logits(x, backend.load_vocabulary(weight, None)[1])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = backend.linear(x, backend.load_linear(weight, None))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=1e-4)


def _attention_case(rng: random.Random, block_size: int) -> ForwardBatch:
    """Sequences with random contexts, of which the last few positions are queries."""
    contexts = [rng.choice((1, 5, 63, 64, 65, 130, 200)) for _ in range(rng.randint(1, 6))]
    counts = [rng.choice((1, 1, 2, context // 2, context)) for context in contexts]
    counts = [min(max(count, 1), context) for count, context in zip(counts, contexts, strict=True)]
    return _attention_batch(rng, block_size, contexts, counts)


def _attention_batch(rng: random.Random, block_size: int, contexts: list[int], counts: list[int]) -> ForwardBatch:
    """The last `counts` positions of sequences with blocks scattered over a pool of 1024 positions."""
    blocks = rng.sample(range(1024 // block_size), 1024 // block_size)
    tables = torch.full((len(contexts), max(-(-context // block_size) for context in contexts)), 1 << 30)
    starts, positions, slots = [0], [], []
    for index, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        own = [blocks.pop() for _ in range(-(-context // block_size))]
        tables[index, : len(own)] = torch.tensor(own)
        starts.append(starts[-1] + count)
        new = range(context - count, context)
        positions += new
        slots += [own[p // block_size] * block_size + p % block_size for p in new]
    total = starts[-1]
    return ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables.int(),
        logits_rows=torch.arange(total),
    )


@pytest.mark.parametrize("window", [0, 1, 30, 64, 65, 150])
@pytest.mark.parametrize("seed", range(12))
def test_rope_and_paged_attention_against_the_oracle(seed: int, window: int) -> None:
    rng = random.Random(seed)
    groups, repeats = rng.choice((1, 2, 3)), rng.choice((1, 3, 4, 8))
    heads, head_dim, block_size = groups * repeats, rng.choice((10, 20, 64)), rng.choice((1, 8, 16, 24, 128))
    batch = _attention_case(rng, block_size)
    total = batch.query_starts[-1]
    backend = TorchCpuBackend(torch.float32, deterministic=True)
    cos, sin = reference.rope_tables(*reference.rope_frequencies(head_dim, 10000.0), num_positions=256)
    backend.load_rope(cos, sin)
    kv = backend.allocate_kv(2, 1024 // block_size, block_size, groups, head_dim)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(total, n, head_dim) for n in (heads, groups, groups))
    k_pool, v_pool = (torch.randn(1024 // block_size * block_size, groups, head_dim) for _ in range(2))
    for pool, ours in ((k_pool, kv.k), (v_pool, kv.v)):
        by_head = pool.view(-1, block_size, groups, head_dim).permute(2, 0, 1, 3)
        ours[1].view(groups, -1, block_size, kv.head_dim)[..., :head_dim] = by_head
    k_rotated = reference.apply_rope(k, cos[batch.positions], sin[batch.positions])
    k_pool[batch.slots], v_pool[batch.slots] = k_rotated, v
    rotated = backend.rope_and_write(torch.cat((q, k, v), dim=1).flatten(1), heads, kv, 1, batch)
    expected_q = reference.apply_rope(q, cos[batch.positions], sin[batch.positions])
    torch.testing.assert_close(rotated, expected_q, rtol=0, atol=1e-5)
    expected = reference.paged_attention(
        expected_q.double(),
        k_pool.double(),
        v_pool.double(),
        batch.block_tables,
        block_size,
        batch.query_starts,
        batch.context_lens,
        window,
    )
    actual = backend.attention(rotated, kv, 1, batch, window)
    torch.testing.assert_close(actual.double(), expected.flatten(1), rtol=0, atol=2e-5)
    assert not kv.k[0].any(), "another layer was written to"


def _row_alone(batch: ForwardBatch, index: int, row: int) -> ForwardBatch:
    """The flat token `row` of sequence `index`."""
    return ForwardBatch(
        token_ids=batch.token_ids[row : row + 1],
        positions=batch.positions[row : row + 1],
        slots=batch.slots[row : row + 1],
        query_starts=[0, 1],
        context_lens=[batch.context_lens[index] - (batch.query_starts[index + 1] - 1 - row)],
        block_tables=batch.block_tables[index : index + 1],
        logits_rows=torch.tensor([0]),
    )


@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize("seed", range(6))
def test_attention_rows_have_the_same_bits_alone_and_for_any_threads(seed: int, window: int) -> None:
    rng = random.Random(seed)
    groups, repeats = rng.choice(((3, 3), (1, 8), (2, 1)))
    head_dim = 64
    backend = TorchCpuBackend(torch.float32, deterministic=True)
    backend.load_rope(*reference.rope_tables(*reference.rope_frequencies(head_dim, 10000.0), num_positions=256))
    kv = backend.allocate_kv(1, 64, 16, groups, head_dim)
    torch.manual_seed(seed)
    kv.k.normal_()
    kv.v.normal_()
    batch = _attention_case(rng, 16)
    q = torch.randn(batch.query_starts[-1], groups * repeats, head_dim)
    torch.set_num_threads(1)
    expected = backend.attention(q, kv, 0, batch, window)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for index in range(len(batch.context_lens)):
            start, end = batch.query_starts[index], batch.query_starts[index + 1]
            for row in {start, rng.randrange(start, end), end - 1}:
                alone = _row_alone(batch, index, row)
                assert torch.equal(backend.attention(q[row : row + 1], kv, 0, alone, window)[0], expected[row])


@pytest.mark.parametrize("window", [190, 300, 450])
def test_windows_of_several_tiles_give_the_same_bits_in_a_chunk_and_alone(window: int) -> None:
    """Tiles are added up in pairs, and which of them are left out in front differs between a chunk and a row."""
    rng = random.Random(window)
    backend = TorchCpuBackend(torch.float32, deterministic=True)
    backend.load_rope(*reference.rope_tables(*reference.rope_frequencies(64, 10000.0), num_positions=1024))
    kv = backend.allocate_kv(1, 64, 16, 2, 64)
    torch.manual_seed(window)
    kv.k.normal_()
    kv.v.normal_()
    batch = _attention_batch(rng, 16, [900], [333])
    q = torch.randn(333, 6, 64)
    expected = backend.attention(q, kv, 0, batch, window)
    for row in (0, *rng.sample(range(333), 20), 332):
        alone = _row_alone(batch, 0, row)
        assert torch.equal(backend.attention(q[row : row + 1], kv, 0, alone, window)[0], expected[row]), row
