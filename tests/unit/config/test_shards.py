"""How a model is dealt out to ranks: every part once, queries beside their keys, as evenly as it goes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.schema import ModelArch
from config.shards import Span, can_split, largest, most_ranks, shard
from tools.model_shapes import LLAMA_3_1_8B, SMOLLM2_135M


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelArch, int]:
    """A model and a number of ranks that it can be split among."""
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    inner = draw(st.one_of(st.integers(1, 2000), st.integers(1, 60).map(lambda groups: 32 * groups)))
    arch = msgspec.structs.replace(
        SMOLLM2_135M,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=draw(st.integers(1, 5000)),
    )
    return arch, draw(st.integers(1, most_ranks(arch)))


def members(span: Span) -> list[int]:
    return list(range(span.start, span.start + span.count))


@given(splits())
def test_every_part_is_on_one_rank_and_keys_are_where_their_queries_are(split: tuple[ModelArch, int]) -> None:
    arch, size = split
    shards = [shard(arch, rank, size) for rank in range(size)]
    for name, count in (
        ("heads", arch.num_heads),
        ("mlp", arch.intermediate_size),
        ("vocab", arch.vocab_size),
    ):
        assert [index for part in shards for index in members(getattr(part, name))] == list(range(count)), name
    assert {index for part in shards for index in members(part.kv_heads)} == set(range(arch.num_kv_heads))
    group = arch.num_heads // arch.num_kv_heads
    for part in shards:
        assert part.heads.count >= 1
        assert part.mlp.count >= 1
        # What attention kernels take: the i-th query of a rank belongs to its (i // local group)-th key.
        local, rest = divmod(part.heads.count, part.kv_heads.count)
        assert rest == 0
        keys = members(part.kv_heads)
        assert [head // group for head in members(part.heads)] == [keys[i // local] for i in range(part.heads.count)]


@given(splits())
def test_shares_are_even(split: tuple[ModelArch, int]) -> None:
    arch, size = split
    shards = [shard(arch, rank, size) for rank in range(size)]
    if size <= arch.num_kv_heads:
        counts = [part.kv_heads.count for part in shards]
        assert max(counts) - min(counts) <= 1
    else:
        assert {part.kv_heads.count for part in shards} == {1}
        # No other way to give each rank queries of one key has a smaller largest share.
        group = arch.num_heads // arch.num_kv_heads
        assert max(part.heads.count for part in shards) == -(-group // (size // arch.num_kv_heads))
    widths = [part.mlp.count for part in shards]
    unit = 32 if arch.intermediate_size % 32 == 0 and arch.intermediate_size // 32 >= size else 1
    assert all(width % unit == 0 for width in widths)
    assert max(widths) - min(widths) <= unit
    # An id is looked up at its place in the rank's rows, and all ranks' logits are put side by side.
    assert size * shards[0].vocab_rows >= arch.vocab_size
    for rank, part in enumerate(shards):
        assert part.vocab_rows == shards[0].vocab_rows
        assert part.vocab.count == 0 or part.vocab.start == rank * part.vocab_rows


@given(splits())
def test_memory_is_planned_for_the_rank_with_most(split: tuple[ModelArch, int]) -> None:
    arch, size = split
    most = largest(arch, size)
    shards = [shard(arch, rank, size) for rank in range(size)]
    for name in ("heads", "kv_heads", "mlp"):
        assert getattr(most, name).count == max(getattr(part, name).count for part in shards)


def test_three_kv_heads_among_two_and_four_ranks() -> None:
    """SmolLM2-135M: 9 heads of 3 KV heads, 1,536 columns."""
    two = [shard(SMOLLM2_135M, rank, 2) for rank in range(2)]
    assert [(part.heads.count, part.kv_heads.count, part.mlp.count) for part in two] == [(6, 2, 768), (3, 1, 768)]
    four = [shard(SMOLLM2_135M, rank, 4) for rank in range(4)]
    assert [(part.heads, part.kv_heads) for part in four] == [
        (Span(0, 2), Span(0, 1)),
        (Span(2, 1), Span(0, 1)),
        (Span(3, 3), Span(1, 1)),
        (Span(6, 3), Span(2, 1)),
    ]
    assert [part.vocab_rows for part in four] == [12_288] * 4


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_what_divides_is_divided(size: int) -> None:
    part = shard(LLAMA_3_1_8B, size - 1, size)
    assert part.heads == Span(32 - 32 // size, 32 // size)
    assert part.kv_heads.count == max(1, 8 // size)
    assert part.mlp == Span(14_336 - 14_336 // size, 14_336 // size)


def test_more_ranks_than_heads_or_columns_cannot_be() -> None:
    assert [tp for tp in range(1, 65) if can_split(SMOLLM2_135M, tp)] == list(range(1, 10))
    narrow = msgspec.structs.replace(LLAMA_3_1_8B, intermediate_size=6)
    assert most_ranks(narrow) == 6
    with pytest.raises(ValueError, match="10 ranks for 9 heads"):
        largest(SMOLLM2_135M, 10)
