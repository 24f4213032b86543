"""Blocks of requests: prefix reuse, allocation with eviction, release. Joins the pool and the radix tree."""

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_tree import Node, RadixTree
from scheduler_proc.request import Request


class KVManager:
    """Owner of the pool and the tree. Every block is free, in transit, the tree's, or private to one request."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size)
        self._prefix_cache = prefix_cache
        self.num_private = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be had at once: free, or cached and unused."""
        return self.pool.num_free + self.tree.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, reserve: int) -> bool:
        """Give a waiting request the blocks of all its known tokens, the cached prefix first.

        False, and nothing changes, when that would leave fewer than `reserve` blocks available. At least the last token
        is computed anew, since its logits are what the next token is sampled from.
        """
        shared: list[int] = []
        node = None
        if self._prefix_cache:
            usable = (len(request.tokens) - 1) // self.block_size * self.block_size
            shared, node = self.tree.match(request.tokens[:usable].tobytes(), request.namespace)
        if node is not None:
            self.tree.lock(node)
        needed = self.blocks_for(len(request.tokens)) - len(shared)
        if needed + reserve > self.num_available:
            if node is not None:
                self.tree.unlock(node)
            return False
        request.lock = node
        fresh = self._take(needed)
        request.block_table = shared + fresh
        request.private_blocks = set(fresh)
        self.num_private += needed
        request.num_planned = request.num_confirmed = len(shared) * self.block_size
        return True

    def _take(self, count: int) -> list[int]:
        """`count` blocks, which the caller knows to be available."""
        if count > self.pool.num_free:
            self.pool.release(self.tree.evict(count - self.pool.num_free), None)
        return self.pool.allocate(count)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the block table to hold `num_tokens`; the new block ids, or None when they cannot be had now."""
        needed = self.blocks_for(num_tokens) - len(request.block_table)
        if needed <= 0:
            return []
        if needed > self.num_available:
            return None
        fresh = self._take(needed)
        request.block_table += fresh
        request.private_blocks.update(fresh)
        self.num_private += needed
        return fresh

    def publish(self, request: Request) -> None:
        """Offer a running request's confirmed full blocks to the tree, so that others can share them.

        Not once the tree has got the same tokens from another request: this one would then hold the tree's blocks
        besides its own, more than its admission counted on, and could wait forever for a block that is there twice.
        """
        full, held = self._num_full(request), self._num_held(request)
        if not self._prefix_cache or full <= held:
            return
        known, _ = self.tree.match(request.tokens[: full * self.block_size].tobytes(), request.namespace)
        if len(known) > held:
            return
        node = self._insert(request, full)
        self.tree.lock(node)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        request.lock = node

    def _insert(self, request: Request, full: int) -> Node:
        tokens = request.tokens[: full * self.block_size].tobytes()
        node, taken = self.tree.insert(tokens, request.block_table[:full], request.namespace)
        assert node is not None
        request.private_blocks.difference_update(taken)
        self.num_private -= len(taken)
        return node

    def _num_full(self, request: Request) -> int:
        """Blocks of which every position has been computed."""
        return min(request.num_confirmed, len(request.tokens)) // self.block_size

    def _num_held(self, request: Request) -> int:
        """Blocks from the root to the end of the node that the request holds."""
        held = 0
        node = request.lock
        while node is not None:
            held += len(node.blocks)
            node = node.parent
        return held

    def release(self, request: Request, last_step: int | None) -> None:
        """Take all blocks from a request; what it computed stays in the tree. `last_step`: the last that names them."""
        full = self._num_full(request)
        if self._prefix_cache and full > self._num_held(request):
            self._insert(request, full)
        if request.lock is not None:
            self.tree.unlock(request.lock)
            request.lock = None
        self.pool.release(sorted(request.private_blocks), last_step)
        self.num_private -= len(request.private_blocks)
        request.private_blocks = set()
        request.block_table = []
        request.num_planned = request.num_confirmed = 0
