"""What of a model each tensor-parallel rank has (Shoeybi et al. 2019), for counts that need not divide.

A rank's query heads all belong to whole KV heads of its own, the same number to each: that is what attention kernels
take. With at least as many KV heads as ranks, these are dealt out in order, with their queries. With fewer, each KV
head has copies on several ranks, which share its queries.

Heads and MLP are each spread as evenly as they can be by themselves. A larger slice of the MLP for a rank with fewer
heads would even out memory, but cost time: ranks wait for each other after attention and after the MLP.
"""

import msgspec
from msgspec import Struct

from config.schema import ModelArch

GROUP = 32  # inputs that share a scale in quantized weights: a slice of the MLP is a whole number of them if possible


class Span(Struct, frozen=True):
    """`count` of something, from the `start`-th."""

    start: int
    count: int

    def times(self, width: int) -> "Span":
        """The elements of these, of `width` each."""
        return Span(self.start * width, self.count * width)


class Shard(Struct, frozen=True):
    """One rank's part of every layer, and of the vocabulary."""

    heads: Span
    kv_heads: Span
    mlp: Span  # of `intermediate_size`
    vocab: Span  # rows that exist; every rank holds `vocab_rows`, the last ones filled up
    vocab_rows: int  # the same on all ranks


def shard(arch: ModelArch, rank: int, size: int) -> Shard:
    """Rank `rank`'s of `size`, which `can_split` allows."""
    kv_heads = arch.num_kv_heads
    group = arch.num_heads // kv_heads
    if size <= kv_heads:
        kv = _even(kv_heads, rank, size)
        heads = kv.times(group)
    else:
        holders = [_even(size, index, kv_heads) for index in range(kv_heads)]  # the ranks that have each KV head
        index = next(index for index, span in enumerate(holders) if rank < span.start + span.count)
        within = _even(group, rank - holders[index].start, holders[index].count)
        kv = Span(index, 1)
        heads = Span(index * group + within.start, within.count)
    unit = _mlp_unit(arch, size)
    rows = -(-arch.vocab_size // size)
    start = min(rank * rows, arch.vocab_size)
    return Shard(
        heads=heads,
        kv_heads=kv,
        mlp=_even(arch.intermediate_size // unit, rank, size).times(unit),
        vocab=Span(start, min(rows, arch.vocab_size - start)),
        vocab_rows=rows,
    )


def largest(arch: ModelArch, size: int) -> Shard:
    """Of each part as much as the rank has that has most of it: what memory is planned for. The starts mean nothing."""
    if not can_split(arch, size):
        raise ValueError(f"{size} ranks for {arch.num_heads} heads and an MLP of {arch.intermediate_size}")
    shards = [shard(arch, rank, size) for rank in range(size)]
    heads, kv_heads, mlp = (
        Span(0, max(getattr(part, name).count for part in shards)) for name in ("heads", "kv_heads", "mlp")
    )
    return msgspec.structs.replace(shards[0], heads=heads, kv_heads=kv_heads, mlp=mlp)


def can_split(arch: ModelArch, size: int) -> bool:
    """Whether each of `size` ranks has at least one query head and one column of the MLP."""
    return size <= most_ranks(arch)


def most_ranks(arch: ModelArch) -> int:
    """As many as can have a part each."""
    return min(arch.num_heads, arch.intermediate_size)


def _mlp_unit(arch: ModelArch, size: int) -> int:
    groups, rest = divmod(arch.intermediate_size, GROUP)
    return GROUP if rest == 0 and groups >= size else 1


def _even(count: int, index: int, parts: int) -> Span:
    """The `index`-th of `parts` parts of `count` things in order, which differ by at most one; larger ones first."""
    size, more = divmod(count, parts)
    return Span(index * size + min(index, more), size + (index < more))
