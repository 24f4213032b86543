"""Causal attention over a paged KV pool in torch operations, with the same bits for a row however it is batched.

The keys of a sequence are cut into tiles counted from position 0. For each tile a row has a partial result (its
largest score, its sum of exponentials, its weighted values), computed by products of fixed inner sizes with a multiple
of 4 rows (see `torch_cpu`); a second pass weighs the partial results against the row's largest score (Dao et al. 2023,
split-KV "flash decoding") and adds them up pairwise in an order that tiles beyond the row's last one or in front of its
window, which weigh exactly 0, do not change. So it makes no difference whether a token is decoded alone, in a batch, or
in the middle of a prefill chunk.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from gpu_workers.batch import ForwardBatch

_KEY_TILE = 64  # positions; rounded up to whole blocks
_QUERY_TILE = 64  # tokens of a prefill chunk that are attended to at once: bounds the memory for scores
_NOTHING = -1e30  # the largest score of a tile in which a row sees no key: finite, so that differences are not NaN


@dataclass(slots=True, frozen=True)
class PagedKV:
    """The KV pool of one rank: [layers, G, blocks, block size x D]; a block of a head is one piece of memory.

    D is filled up with zeros to a multiple of 4: the columns beyond one are computed differently row by row.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_size: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def allocate(
        cls, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "PagedKV":
        head_dim += -head_dim % 4
        shape = (num_layers, num_kv_heads, num_blocks, block_size * head_dim)
        return cls(_zeros(shape, dtype), _zeros(shape, dtype), block_size, num_kv_heads, head_dim)

    @property
    def num_blocks(self) -> int:
        return self.k.shape[2]

    @property
    def tile_blocks(self) -> int:
        """Blocks in a key tile."""
        return -(-_KEY_TILE // self.block_size)

    def write(self, layer: int, plan: "AttentionPlan", k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, G, D] in the batch's slots."""
        for pool, new in ((self.k, k), (self.v, v)):
            rows = pool[layer].view(-1, self.head_dim)[:, : new.shape[-1]]
            rows.index_copy_(0, plan.head_slots, new.transpose(0, 1).reshape(-1, new.shape[-1]))

    def gather(self, pool: torch.Tensor, layer: int, head_blocks: torch.Tensor) -> torch.Tensor:
        """Key tiles [tiles of all heads, tile, D] in float32."""
        blocks = pool[layer].view(-1, self.block_size * self.head_dim).index_select(0, head_blocks)
        return blocks.view(-1, self.tile_blocks * self.block_size, self.head_dim).float()

    def head_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block ids [n] -> rows [G * n] of `pool[layer]` seen as [G * blocks, ...], head by head."""
        heads = torch.arange(self.num_kv_heads)[:, None] * self.num_blocks
        return (heads + blocks.flatten()).flatten()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pages that the system provides when they are first written: torch would write them all at once.

    Zeros, not whatever is there: masked positions weigh 0, and 0 times a NaN left in memory would be NaN.
    """
    as_bytes = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(as_bytes).view(dtype)


@dataclass(slots=True, frozen=True)
class _Decode:
    """All sequences with one query. P pairs of a row and a tile that it sees, row by row; R rows of up to N tiles."""

    tokens: torch.Tensor  # [R] flat token of each row
    pair_rows: torch.Tensor  # [P]
    head_blocks: torch.Tensor  # [G * P * tile blocks]
    hidden: torch.Tensor  # [P, 1, tile] bool: positions beyond the row's context or in front of its window
    pairs: (
        torch.Tensor | None
    )  # [R * N] pair of each row and tile, P where there is none; None if all rows have N tiles
    num_tiles: int  # N


@dataclass(slots=True, frozen=True)
class _Chunk:
    """The queries of one sequence that has more than one."""

    start: int  # flat token
    count: int
    first_position: int
    first_tile: int  # that a query sees
    head_blocks: torch.Tensor  # [G * tiles from the first on * tile blocks]
    window: int


@dataclass(slots=True, frozen=True)
class _Queries:
    """Those of a batch, for the layers of one window."""

    decode: _Decode | None
    chunks: list[_Chunk]


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """What the layers of one forward share."""

    batch: ForwardBatch
    cos: torch.Tensor  # [T, 1, D] float32
    sin: torch.Tensor
    head_slots: torch.Tensor  # [G * T] int64: rows of the pool of one layer seen as [G * slots, D]
    queries: dict[int, _Queries]  # by window, as the layers ask for them

    @classmethod
    def build(cls, batch: ForwardBatch, kv: PagedKV, cos: torch.Tensor, sin: torch.Tensor) -> "AttentionPlan":
        heads = torch.arange(kv.num_kv_heads)[:, None] * (kv.num_blocks * kv.block_size)
        return cls(
            batch=batch,
            cos=cos[batch.positions].repeat(1, 2)[:, None],
            sin=sin[batch.positions].repeat(1, 2)[:, None],
            head_slots=(heads + batch.slots).flatten(),
            queries={},
        )

    def queries_of(self, kv: PagedKV, window: int) -> _Queries:
        """Planned once for all layers with this window; 0: none."""
        if window not in self.queries:
            counts = [end - start for start, end in pairwise(self.batch.query_starts)]
            single = [index for index, count in enumerate(counts) if count == 1]
            several = [index for index, count in enumerate(counts) if count > 1]
            self.queries[window] = _Queries(
                decode=_plan_decode(self.batch, kv, single, window) if single else None,
                chunks=[_plan_chunk(self.batch, kv, index, window) for index in several],
            )
        return self.queries[window]


def _plan_decode(batch: ForwardBatch, kv: PagedKV, sequences: list[int], window: int) -> _Decode:
    tile_blocks, tile = kv.tile_blocks, kv.tile_blocks * kv.block_size
    contexts = torch.tensor([batch.context_lens[index] for index in sequences])
    first_seen = (contexts - window).clamp(min=0) if window else torch.zeros_like(contexts)
    first_tiles = first_seen // tile
    tiles = (contexts + tile - 1) // tile - first_tiles
    num_rows, num_tiles, num_pairs = len(sequences), int(tiles.max()), int(tiles.sum())
    pair_rows = torch.repeat_interleave(torch.arange(num_rows), tiles)
    pair_places = torch.arange(num_pairs) - (tiles.cumsum(0) - tiles)[pair_rows]
    pair_tiles = pair_places + first_tiles[pair_rows]
    pair_contexts = contexts[pair_rows][:, None]
    block_indices = pair_tiles[:, None] * tile_blocks + torch.arange(tile_blocks)
    tables = batch.block_tables[torch.tensor(sequences)]
    blocks = tables[pair_rows[:, None], block_indices.clamp(max=tables.shape[1] - 1)].long()
    blocks = blocks.masked_fill(block_indices * kv.block_size >= pair_contexts, 0)
    pairs = None
    if num_pairs != num_rows * num_tiles:
        pairs = torch.full((num_rows, num_tiles), num_pairs)
        pairs[pair_rows, pair_places] = torch.arange(num_pairs)
        pairs = pairs.flatten()
    key_positions = pair_tiles[:, None] * tile + torch.arange(tile)
    return _Decode(
        tokens=torch.tensor([batch.query_starts[index] for index in sequences]),
        pair_rows=pair_rows,
        head_blocks=kv.head_blocks(blocks),
        hidden=((key_positions >= pair_contexts) | (key_positions < first_seen[pair_rows][:, None]))[:, None],
        pairs=pairs,
        num_tiles=num_tiles,
    )


def _plan_chunk(batch: ForwardBatch, kv: PagedKV, index: int, window: int) -> _Chunk:
    start, end = batch.query_starts[index], batch.query_starts[index + 1]
    context = batch.context_lens[index]
    num_blocks = -(-context // kv.block_size)
    blocks = torch.zeros(-(-num_blocks // kv.tile_blocks) * kv.tile_blocks, dtype=torch.int64)
    blocks[:num_blocks] = batch.block_tables[index, :num_blocks]
    first_position = context - (end - start)
    first_tile = _first_seen(first_position, window) // (kv.tile_blocks * kv.block_size)
    head_blocks = kv.head_blocks(blocks[first_tile * kv.tile_blocks :])
    return _Chunk(start, end - start, first_position, first_tile, head_blocks, window)


def _first_seen(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def attend(q: torch.Tensor, kv: PagedKV, layer: int, plan: AttentionPlan, window: int = 0) -> torch.Tensor:
    """q [T, H, D], rotated -> [T, H * D] in float32; the batch's own K and V are in the pool already.

    A query sees the last `window` positions up to its own; 0: all of them.
    """
    queries = plan.queries_of(kv, window)
    tokens, num_heads, head_dim = q.shape
    grouped = q.view(tokens, kv.num_kv_heads, -1, head_dim).float() * (1.0 / math.sqrt(head_dim))
    if kv.head_dim > head_dim:
        grouped = F.pad(grouped, (0, kv.head_dim - head_dim))
    if queries.decode is not None and not queries.chunks:
        return _attend_decode(grouped, kv, layer, queries.decode)[..., :head_dim].reshape(tokens, -1)
    output = torch.empty_like(grouped)
    if queries.decode is not None:
        output[queries.decode.tokens] = _attend_decode(grouped[queries.decode.tokens], kv, layer, queries.decode)
    for chunk in queries.chunks:
        end = chunk.start + chunk.count
        output[chunk.start : end] = _attend_chunk(grouped[chunk.start : end], kv, layer, chunk)
    return output[..., :head_dim].reshape(tokens, num_heads * head_dim)


def _attend_decode(q: torch.Tensor, kv: PagedKV, layer: int, plan: _Decode) -> torch.Tensor:
    """q [R, G, heads of a group, D] -> the same shape."""
    rows, groups, heads, head_dim = q.shape
    padded = q.new_zeros(groups, rows, heads + -heads % 4, head_dim)
    padded[:, :, :heads] = q.transpose(0, 1)
    queries = padded.index_select(1, plan.pair_rows)
    num_pairs = queries.shape[1]
    keys = kv.gather(kv.k, layer, plan.head_blocks)
    scores = torch.bmm(queries.flatten(0, 1), keys.transpose(1, 2)).view(groups, num_pairs, -1, keys.shape[1])
    scores.masked_fill_(plan.hidden, -math.inf)
    largest = scores.amax(-1)  # every tile of a row has a key the row sees
    weights = scores.sub_(largest[..., None]).exp_()
    sums = weights.sum(-1)
    values = torch.bmm(weights.flatten(0, 1), kv.gather(kv.v, layer, plan.head_blocks)).view(*sums.shape, head_dim)
    if plan.pairs is not None:
        nothing = largest.new_full((groups, 1, largest.shape[2]), _NOTHING)
        largest = torch.cat((largest, nothing), dim=1).index_select(1, plan.pairs)
        sums = torch.cat((sums, torch.zeros_like(nothing)), dim=1).index_select(1, plan.pairs)
        values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1).index_select(1, plan.pairs)
    by_row = (groups, rows, plan.num_tiles, -1)
    combined = _combine(largest.view(by_row), sums.view(by_row), values.view(*by_row, head_dim))
    return combined[:, :, :heads].transpose(0, 1)


def _attend_chunk(q: torch.Tensor, kv: PagedKV, layer: int, chunk: _Chunk) -> torch.Tensor:
    """q [tokens, G, heads of a group, D] -> the same shape."""
    tokens, groups, heads, head_dim = q.shape
    keys, values = (kv.gather(pool, layer, chunk.head_blocks) for pool in (kv.k, kv.v))
    tile = keys.shape[1]
    keys, values = (gathered.view(groups, -1, tile, head_dim) for gathered in (keys, values))
    output = torch.empty_like(q)
    for begin in range(0, tokens, _QUERY_TILE):
        count = min(_QUERY_TILE, tokens - begin)
        queries = q.new_zeros(groups, count + -count % 4, heads, head_dim)
        queries[:, :count] = q[begin : begin + count].transpose(0, 1)
        first = chunk.first_position + begin
        positions = torch.arange(first, first + queries.shape[1])
        first_tile, end_tile = _first_seen(first, chunk.window) // tile, (first + count - 1) // tile + 1
        seen = slice(first_tile - chunk.first_tile, end_tile - chunk.first_tile)
        result = _attend_tiles(
            queries.flatten(1, 2), keys[:, seen], values[:, seen], positions, heads, first_tile, chunk.window
        )
        output[begin : begin + count] = result.view(groups, -1, heads, head_dim)[:, :count].transpose(0, 1)
    return output


def _attend_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    heads: int,
    first_tile: int,
    window: int,
) -> torch.Tensor:
    """q [G, tokens * heads, D] at `positions` [tokens] over keys and values [G, N, tile, D] -> the shape of q.

    The N tiles are those from `first_tile` on; the ones before it no query sees.
    """
    groups, rows, head_dim = q.shape
    num_tiles, tile = keys.shape[1:3]
    scores = torch.bmm(q, keys.flatten(1, 2).transpose(1, 2)).view(groups, rows, num_tiles, tile)
    row_positions = positions.repeat_interleave(heads)[:, None, None]
    key_positions = torch.arange(first_tile * tile, (first_tile + num_tiles) * tile).view(-1, tile)
    not_late = (int(positions[0]) + 1) // tile - first_tile  # tiles that end at or before the first query
    hidden = (key_positions[not_late:] > row_positions).expand(groups, -1, -1, -1)
    scores[:, :, not_late:].masked_fill_(hidden, -math.inf)
    if window:
        # Tiles that start in front of the last query's window.
        early = _first_seen(int(positions[-1]), window) // tile + 1 - first_tile
        hidden = (key_positions[:early] <= row_positions - window).expand(groups, -1, -1, -1)
        scores[:, :, :early].masked_fill_(hidden, -math.inf)
    largest = scores.amax(-1).clamp_(min=_NOTHING).transpose(1, 2).contiguous()
    weights = torch.empty(groups, num_tiles, rows, tile)
    torch.sub(scores.transpose(1, 2), largest[..., None], out=weights).exp_()
    sums = weights.sum(-1)
    partial = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(groups, 1, num_tiles, rows, head_dim)
    return _combine(largest[:, None], sums[:, None], partial)[:, 0]


def _combine(largest: torch.Tensor, sums: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[G, R, N tiles, M rows], the same, and [..., D] -> [G, R, M, D]: the softmax-weighted values over all tiles."""
    if largest.shape[2] == 1:
        return values[:, :, 0] / sums[:, :, 0, :, None]
    scale = (largest - largest.amax(2, keepdim=True)).exp_()
    total = _sum_tiles(sums * scale)
    return _sum_tiles(values * scale[..., None]) / total[..., None]


def _sum_tiles(x: torch.Tensor) -> torch.Tensor:
    """Sum over axis 2, in place, as if padded with zeros to a power of two and folded in half until one is left.

    Which sums are added to each other depends on the distances of tiles alone, so that further zeros at the end or in
    front change nothing but the number of folds, which torch's own sum does not promise.
    """
    count = x.shape[2]
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        x[:, :, : count - half] += x[:, :, half:count]
        count = half
    return x[:, :, 0]
