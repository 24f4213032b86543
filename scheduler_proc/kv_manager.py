"""Blocks of requests: prefix reuse, allocation with eviction, the host tier, release. Joins the pools and the tree.

Three rules keep it simple.

*Order.* Steps run in the order of their plans. So the full blocks of a prompt enter the tree when they are planned, not
when they are computed, and requests of one step share a prefix that this very step computes; and released blocks can be
handed out by the next plan although the device may still be writing to them.

*Promises.* A request takes blocks as its chunks are planned, but is admitted only if all that it will need stay
available: those are promised to it, and nobody else's growth may touch them.

*Copies.* A block that a plan copies between the KV pool and the host pool is in transit until the next plan is made;
what is copied in can be computed with from then on.
"""

from enum import Enum, auto

from config.schema import SchedulerConfig
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.eviction import make_eviction
from scheduler_proc.pins import Pins
from scheduler_proc.radix_tree import Node, RadixTree
from scheduler_proc.request import Request

_STOCK_BLOCKS = 64  # kept free ahead of need where there is a host tier, since a copy out takes a plan's time


class Growth(Enum):
    """Outcome of asking for one more block."""

    GROWN = auto()
    LATER = auto()  # blocks are being copied out: they are there for the next plan
    SHORT = auto()  # somebody has to give something up


class KVManager:
    """Owner of the pools and the tree. Every block is free, in transit, the tree's, or private to one request."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self.tree = RadixTree(config.block_size, make_eviction(config.eviction))
        self.pins = Pins(self.tree, int(config.pinned_share * num_blocks))
        self._prefix_cache = config.prefix_cache
        self._stock = min(num_blocks // 16, _STOCK_BLOCKS) if num_host_blocks else 0
        self._plan = 0  # number of the plan being made
        self._arriving: set[int] = set()  # host blocks that this plan copies to
        self.copies_out: list[tuple[int, int]] = []  # of this plan: KV block, host block
        self.copies_in: list[tuple[int, int]] = []  # host block, KV block
        self.num_private = 0
        self.num_promised = 0
        self.reused_tokens = 0  # totals since start: prompt tokens that did not have to be computed
        self.evicted_blocks = 0
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0

    @property
    def num_available(self) -> int:
        """Blocks that could still be promised: free by the next plan, or cached and unused, less what is promised."""
        return self.pool.num_free + self.pool.num_in_transit + self.tree.num_evictable - self.num_promised

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def begin_plan(self, number: int) -> None:
        """Plan `number` is being made; all before it have been sent."""
        self._plan = number
        self.pool.begin_plan(number)
        self.host.begin_plan(number)
        if self.pool.num_free < self._stock:
            self._make_free(self._stock)

    def end_plan(self) -> None:
        """The plan has been made, and its copies are in it."""
        self.copies_out, self.copies_in = [], []
        self._arriving.clear()

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a waiting request that both tiers of the cache hold."""
        return sum(self.tree.peek(self._reusable(request), request.namespace)) * self.block_size

    # --- admission ---

    def admit(self, request: Request, *, positions: int, reserve: int) -> bool:
        """Give a waiting request its cached prefix, and the promise of blocks for `positions` in all.

        False, and nothing changes but copies out under way, when that would leave fewer than `reserve` blocks
        available.
        """
        tokens = self._reusable(request)
        # A look first: a request that waits for room should not count as using its prefix again with each plan.
        device, host = self.tree.peek(tokens, request.namespace)
        if self.blocks_for(positions) - device + reserve > self.num_available or not self._make_room(host):
            return False
        match = self.tree.match(tokens, request.namespace)
        if match.node is not None:
            self.tree.lock(match.node)
        needed = self.blocks_for(positions) - len(match.blocks)
        arriving = any(not self._arriving.isdisjoint(node.blocks) for node in match.host)
        if needed + reserve > self.num_available or arriving:
            if match.node is not None:
                self.tree.unlock(match.node)
            return False
        request.lock = match.node
        request.block_table = list(match.blocks)
        request.num_shared = len(match.blocks)
        request.promised = needed
        self.num_promised += needed
        self._promote(request, match.host)
        request.num_planned = request.num_shared * self.block_size
        request.capacity = request.num_planned
        request.num_known = len(request.tokens)
        self._wait_for_copies(request)
        if request.preemptions == 0:
            request.cached_tokens = 0
            self._reused(request, request.num_shared)
        return True

    def _reusable(self, request: Request) -> bytes:
        """The token ids of which cached KV can be used, in whole blocks."""
        if not self._prefix_cache:
            return b""
        return request.tokens[: request.reusable // self.block_size * self.block_size].tobytes()

    def _make_room(self, count: int) -> bool:
        """Free blocks for a prefix that is on the host; False when they are free only for the next plan."""
        if count > self.pool.num_free:
            self._make_free(count)
        return count <= self.pool.num_free or not self.pool.num_in_transit

    def _promote(self, request: Request, nodes: list[Node]) -> None:
        """Bring as much of a prefix as fits from the host back into the pool."""
        chain: list[Node] = []
        count = 0
        for node in nodes:
            if count + len(node.blocks) > min(self.pool.num_free, request.promised):
                break
            chain.append(node)
            count += len(node.blocks)
        if not chain:
            return
        fresh = self.pool.allocate(count)
        pairs = self.tree.promote(chain, fresh)
        self.copies_in += pairs
        self.host.release([host for host, _ in pairs], self._plan)
        for node in chain:
            node.plan_after = self._plan
        self.swapped_in_blocks += count
        self._move_lock(request, chain[-1])
        request.block_table += fresh
        request.num_shared += count
        self._use_promise(request, count)

    def _move_lock(self, request: Request, node: Node) -> None:
        self.tree.lock(node)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        request.lock = node

    def _use_promise(self, request: Request, count: int) -> None:
        used = min(count, request.promised)
        request.promised -= used
        self.num_promised -= used

    def _wait_for_copies(self, request: Request) -> None:
        """A request whose prefix this plan copies in computes from the next plan on."""
        node = request.lock if self.copies_in else None
        while node is not None:
            if node.plan_after == self._plan:
                request.plan_after = self._plan
                return
            node = node.parent

    # --- growth ---

    def _make_free(self, count: int) -> None:
        """Have `count` blocks free, now or by the next plan, as far as unused cached ones can be had.

        With a host tier they are copied there, and free only then; without one, or where it is full of what is worth
        more, they are forgotten and free at once.
        """
        short = count - self.pool.num_free - self.pool.num_in_transit
        if short > 0 and self.host.total:
            missing = short - self.host.num_free - self.host.num_in_transit
            if missing > 0:
                self._free_host(self.tree.evict_host(missing), lost=True)
            ids = self.host.allocate(min(short, self.host.num_free))
            short -= self._copy_out(self.tree.demote(ids), ids)
        if short > 0:
            blocks, orphans = self.tree.evict(short)
            self.pool.release(blocks, None)
            self._free_host(orphans, lost=True)
            self.evicted_blocks += len(blocks)

    def _copy_out(self, pairs: list[tuple[int, int]], host_ids: list[int]) -> int:
        self.host.release(host_ids[len(pairs) :], None)
        self.copies_out += pairs
        self._arriving.update(host for _, host in pairs)
        self.pool.release([block for block, _ in pairs], self._plan)
        self.swapped_out_blocks += len(pairs)
        return len(pairs)

    def _free_host(self, ids: list[int], *, lost: bool) -> None:
        """Host blocks that hold nothing any more; those that a copy of this plan writes to are still in transit."""
        busy = [block for block in ids if block in self._arriving]
        self.host.release([block for block in ids if block not in self._arriving] if busy else ids, None)
        self.host.release(busy, self._plan)
        if lost:
            self.evicted_blocks += len(ids)

    def take(self, request: Request, positions: int) -> list[int]:
        """Extend the table for `positions`, out of what is promised, as far as blocks are free now; the new ones."""
        needed = self.blocks_for(positions) - len(request.block_table)
        if needed <= 0:
            return []
        if needed > self.pool.num_free:
            self._make_free(needed)
        return self._append(request, min(needed, self.pool.num_free))

    def _append(self, request: Request, count: int) -> list[int]:
        fresh = self.pool.allocate(count)
        request.block_table += fresh
        request.capacity = len(request.block_table) * self.block_size
        self.num_private += count
        self._use_promise(request, count)
        return fresh

    def grow(self, request: Request) -> Growth:
        """One more block for a decoding request: the last of its table afterwards."""
        if request.promised == 0 and self.num_available < 1:
            return Growth.SHORT
        if self.pool.num_free == 0:
            self._make_free(1)
            if self.pool.num_free == 0:
                return Growth.LATER
        self._append(request, 1)
        return Growth.GROWN

    # --- sharing ---

    def advance(self, request: Request) -> list[int]:
        """Skip what other requests have planned of the same prompt meanwhile; the blocks gained."""
        start = request.num_shared * self.block_size
        if not self._prefix_cache or request.num_planned != start or len(request.block_table) != request.num_shared:
            return []
        usable = min(request.num_known - 1, request.reusable) // self.block_size * self.block_size
        if usable <= start:
            return []
        match = self.tree.match(request.tokens[start:usable].tobytes(), request.namespace, request.lock)
        if not match.blocks or match.node is None:
            return []
        self._move_lock(request, match.node)
        request.block_table += match.blocks
        request.num_shared += len(match.blocks)
        request.num_planned = request.capacity = request.num_shared * self.block_size
        self._use_promise(request, len(match.blocks))
        self._wait_for_copies(request)
        if request.preemptions == 0:
            self._reused(request, len(match.blocks))
        return match.blocks

    def _reused(self, request: Request, num_blocks: int) -> None:
        request.cached_tokens += num_blocks * self.block_size
        self.reused_tokens += num_blocks * self.block_size

    def publish(self, request: Request) -> None:
        """Offer the planned full blocks of a prompt to the tree, so that others can share them.

        Not once the tree has got the same tokens from another request: this one would then hold the tree's blocks
        besides its own.
        """
        first, full = request.num_shared, request.num_planned // self.block_size
        if not self._prefix_cache or full <= first:
            return
        tokens = request.tokens[first * self.block_size : full * self.block_size].tobytes()
        if self.tree.match(tokens[: 4 * self.block_size], request.namespace, request.lock).blocks:
            return
        node, taken, freed_host = self.tree.insert(
            tokens, request.block_table[first:full], request.namespace, request.lock
        )
        assert node is not None
        self._free_host(freed_host, lost=False)
        self._move_lock(request, node)
        request.num_shared = full
        self.num_private -= len(taken)

    def pin(self, request: Request, now: float) -> None:
        """Keep the prompt of a request that has just been planned to its end, if it asked for that."""
        if request.pin_seconds > 0 and request.lock is not None:
            self.pins.pin(request.lock, now + request.pin_seconds)

    # --- release ---

    def release(self, request: Request, *, swap_out: bool = False) -> None:
        """Take all blocks from a request; what was planned stays in the tree, or goes to the host with `swap_out`."""
        table, first = request.block_table, request.num_shared
        full = min(request.num_planned, len(request.tokens)) // self.block_size
        node, private = request.lock, table[first:]
        self.num_private -= len(private)
        if self._prefix_cache and full > first:
            tokens = request.tokens[first * self.block_size : full * self.block_size].tobytes()
            node, taken, freed_host = self.tree.insert(tokens, table[first:full], request.namespace, request.lock)
            self._free_host(freed_host, lost=False)
            twice = full - first - len(taken)  # the tree had these from somebody else
            private = private[:twice] + private[full - first :]
        self.pool.release(private, None)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        if swap_out and node is not None:
            self._swap_out(node)
        self._forget(request)

    def _swap_out(self, node: Node) -> None:
        """Copy the blocks that only this request used to the host at once: they are what is short."""
        count, current, below = 0, node, 0
        while current.parent is not None and not current.locks and current.device_children == below:
            count, current, below = count + len(current.blocks), current.parent, 1
        missing = count - self.host.num_free
        if missing > 0:
            self._free_host(self.tree.evict_host(missing), lost=True)
        ids = self.host.allocate(min(count, self.host.num_free))
        self._copy_out(self.tree.demote_path(node, ids), ids)

    def _forget(self, request: Request) -> None:
        self.num_promised -= request.promised
        request.promised = 0
        request.lock = None
        request.block_table = []
        request.num_shared = request.capacity = request.num_planned = 0
        request.plan_after = -1

    def reset(self, running: list[Request]) -> None:
        """All KV is lost, on the device and on the host."""
        for request in running:
            self._forget(request)
        self.pool.reset()
        self.host.reset()
        self.tree.clear()
        self.pins.reset()
        self.num_private = 0
        self.end_plan()
