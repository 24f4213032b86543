"""How close each eviction policy comes to the best that is possible, on a trace's prompts and a small cache.

The prompts pass one after another, without time: each looks up its full blocks, then all of them are put into the
cache. LRU, LFU and FIFO are the scheduler's own tree and policies.

Belady's MIN (Belady 1966; Mattson et al. 1970) gives up the block whose next use is farthest away, the one that has
just been used included, and no cache has more hits on the same sequence. Here a block is only of use when all blocks
before it in the prompt are there as well. That costs MIN nothing: whoever uses a block uses all blocks before it, and
earlier, so the next use of a block is never before that of a block it needs. MIN thus gives up a prefix from its end
(of blocks never used again, the later one first) and always holds whole prefixes, so all its hits count under the
prefix rule too; and that rule cannot give any other cache more.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
from msgspec import Struct

from config.schema import EvictionName
from scheduler_proc.eviction import make_eviction
from scheduler_proc.radix_tree import RadixTree
from tools.reports.table import Rows
from tools.simulate.traces import TraceRequest, infinite_cache_walk

Progress = Callable[[str, int, int], None]  # policy, prompts done, prompts

_NEVER = 1 << 62


class Study(Struct, frozen=True, kw_only=True):
    """Hits in blocks of `block_size` tokens."""

    block_size: int
    capacity: int  # blocks
    unique_blocks: int
    accesses: int  # full blocks of all prompts
    prompt_tokens: int
    infinite: int
    belady: int
    policies: dict[str, int]


def study(
    requests: Sequence[TraceRequest], block_size: int, capacity: int | None, progress: Progress | None = None
) -> Study:
    """Run all policies; `capacity` None: a tenth of the different blocks."""
    prompts: list[list[int]] = []
    infinite = 0
    for hits, numbers in infinite_cache_walk(requests, block_size):
        prompts.append(numbers)
        infinite += hits
    unique = 1 + max((number for numbers in prompts for number in numbers), default=-1)
    capacity = capacity or max(1, unique // 10)
    return Study(
        block_size=block_size,
        capacity=capacity,
        unique_blocks=unique,
        accesses=sum(len(numbers) for numbers in prompts),
        prompt_tokens=sum(request.input_length for request in requests),
        infinite=infinite,
        belady=belady_hits(prompts, capacity),
        policies={name: tree_hits(name, prompts, capacity, progress) for name in get_args(EvictionName)},
    )


def tree_hits(policy: str, prompts: Sequence[Sequence[int]], capacity: int, progress: Progress | None = None) -> int:
    """Blocks found by the scheduler's radix tree with this eviction policy, holding at most `capacity`.

    A prompt is a list of block numbers, of which each stands for a block and all before it; the tree is given one
    token a block. A prompt longer than the cache keeps its beginning.
    """
    tree = RadixTree(1, make_eviction(policy))
    free = list(range(capacity))
    hits = 0
    for done, numbers in enumerate(prompts):
        tokens = np.array(numbers, dtype=np.int32).tobytes()
        match = tree.match(tokens)
        hits += len(match.blocks)
        if match.node is not None:
            tree.lock(match.node)  # what the prompt uses is not evicted for its rest
        wanted = min(len(numbers) - len(match.blocks), capacity - len(match.blocks))
        if wanted > len(free):
            freed, _ = tree.evict(wanted - len(free))
            free += freed
        fresh = [free.pop() for _ in range(min(wanted, len(free)))]
        start = len(match.blocks)
        inserted = tree.insert(tokens[4 * start : 4 * (start + len(fresh))], fresh, after=match.node)
        assert len(inserted.taken) == len(fresh)
        if match.node is not None:
            tree.unlock(match.node)
        if progress is not None and done % 256 == 0:
            progress(policy, done, len(prompts))
    return hits


def belady_hits(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks that MIN finds, holding at most `capacity`. O(accesses x log accesses)."""
    sequence = [number for numbers in prompts for number in numbers]
    depths = [depth for numbers in prompts for depth in range(len(numbers))]
    next_use = [_NEVER] * len(sequence)
    upcoming: dict[int, int] = {}
    for index in range(len(sequence) - 1, -1, -1):
        next_use[index] = upcoming.get(sequence[index], _NEVER)
        upcoming[sequence[index]] = index
    cached: dict[int, int] = {}  # block -> its next use
    farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); outdated entries are skipped
    hits = 0
    for index, block in enumerate(sequence):
        hits += block in cached
        cached[block] = next_use[index]
        heapq.heappush(farthest, (-next_use[index], -depths[index], block))
        while len(cached) > capacity:
            use, _, victim = heapq.heappop(farthest)
            if cached.get(victim) == -use:
                del cached[victim]
    return hits


def study_rows(result: Study) -> Rows:
    """Columns: token hits, hit rate of prompt tokens, share of Belady's hits, share of the infinite cache's hits."""

    def row(name: str, hits: int) -> tuple[str, list[str]]:
        tokens = hits * result.block_size
        return (
            name,
            [
                f"{tokens:,}",
                f"{tokens / max(1, result.prompt_tokens):.2%}",
                f"{hits / max(1, result.belady):.1%}",
                f"{hits / max(1, result.infinite):.1%}",
            ],
        )

    rows = [row(name, hits) for name, hits in result.policies.items()]
    return [*rows, row("belady (optimum)", result.belady), row("no limit", result.infinite)]


STUDY_LABELS = ("tokens hit", "of prompt tokens", "of belady", "of no limit")
