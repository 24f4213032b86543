"""Looks at requests and at the prefix tree for people: what `Stats` only counts. Changes nothing.

Each call does little, since the next step waits for it: only a few requests are told of, and a large tree is walked
through in pieces, between which it goes on changing. So a walk may miss what came or was cut in two meanwhile, until
the next walk; what is reported of a node is always true of it at that moment.
"""

import hashlib
import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Literal

from ipc.stats_messages import CachedPrefix, EngineDetails, LiveRequest
from scheduler_proc.core import SchedulerCore
from scheduler_proc.radix_tree import Node
from scheduler_proc.request import Request

MAX_REQUESTS = 50
MAX_PREFIXES = 20
PIECE = 1000  # nodes, or steps from a request's node towards the root, in one piece of a walk
_MAX_MARKS = 4096
_MARK_SECONDS = 1.0

_by_arrival = attrgetter("order")


class _Found:
    """A large node, and what a walk has learned of it that it does not know itself."""

    __slots__ = ("end", "namespace", "node", "users")

    def __init__(self, node: Node, end: int, namespace: str) -> None:
        self.node = node
        self.end = (
            end  # tokens from the root to its end, which stay the same when it is cut in two: it is the lower part
        )
        self.namespace = namespace
        self.users = 0


class Inspector:
    """Times are seconds on the clock of the core's events."""

    def __init__(self, core: SchedulerCore, key: bytes) -> None:
        """`key`: up to 64 secret bytes, so that nobody can find out by trying whether a text is cached."""
        self._core = core
        self._key = key
        self._marks: deque[tuple[int, float]] = deque(maxlen=_MAX_MARKS)  # the tree's clock at a time
        self._walk: Iterator[None] | None = None
        self._clears = 0  # of the tree, when the walk began
        self._found: list[_Found] = []
        self._num_nodes = 0

    def mark(self, now: float) -> None:
        """To be called about once a second, also while nobody looks: it dates what the tree counts in operations."""
        clock = self._core.kv.tree.clock
        if not self._marks or (clock > self._marks[-1][0] and now >= self._marks[-1][1] + _MARK_SECONDS):
            self._marks.append((clock, now))

    def advance(self) -> None:
        """One piece of the walk through the tree; after the last piece the next one begins another walk."""
        if self._walk is None or self._clears != self._core.kv.tree.num_clears:
            self._clears = self._core.kv.tree.num_clears
            self._walk = self._walk_through()
        if next(self._walk, self) is self:
            self._walk = None

    def details(self, now: float, unix_time: float) -> EngineDetails:
        """Requests as they are, and the largest nodes that the last full walk found."""
        if self._clears != self._core.kv.tree.num_clears:
            self._found, self._num_nodes = [], 0
        prefixes = [self._describe(found, now) for found in self._found if found.node.parent is not None]
        prefixes.sort(key=lambda prefix: -prefix.blocks)
        requests = tuple(_describe_request(request, now) for request in self._requests())
        return EngineDetails(unix_time, requests, tuple(prefixes), self._num_nodes)

    def _requests(self) -> list[Request]:
        planner = self._core.planner
        running = heapq.nsmallest(MAX_REQUESTS, planner.prefilling + planner.decoding, key=_by_arrival)
        waiting = (request for request in self._core.requests.values() if request.row < 0)
        return running + list(islice(waiting, MAX_REQUESTS - len(running)))

    # --- the tree ---

    def _walk_through(self) -> Iterator[None]:
        """Yields between two pieces, and fills `_found` at the end."""
        largest: list[tuple[int, int, _Found]] = []  # a heap: blocks, serial number
        block_size = self._core.kv.block_size
        num_nodes = 0
        for root in self._core.kv.tree.roots():
            namespace = root.key.decode()
            stack = [(root, 0, list(root.children.values()))]  # a node, where it ends, children still to be seen
            while stack:
                parent, start, siblings = stack[-1]
                if not siblings:
                    stack.pop()
                    continue
                node = siblings.pop()
                above = node.parent
                if above is None:
                    continue  # evicted since, with all below it
                num_nodes += 1
                blocks = len(node.blocks)
                end = start + blocks * block_size
                while above is not parent:  # it was cut in two since
                    end += len(above.blocks) * block_size
                    above = above.parent
                    assert above is not None
                if len(largest) < MAX_PREFIXES:
                    heapq.heappush(largest, (blocks, num_nodes, _Found(node, end, namespace)))
                elif blocks > largest[0][0]:
                    heapq.heapreplace(largest, (blocks, num_nodes, _Found(node, end, namespace)))
                if node.children:
                    stack.append((node, end, list(node.children.values())))
                if num_nodes % PIECE == 0:
                    yield
        found = {item.node: item for _, _, item in largest}
        for _ in self._count_users(found):
            yield
        self._found, self._num_nodes = list(found.values()), num_nodes

    def _count_users(self, found: dict[Node, _Found]) -> Iterator[None]:
        """Set how many running requests hold each of these nodes, or one below it. Yields between two pieces."""
        nearest: dict[Node, _Found | None] = {}  # of each node seen: the listed one at or above it
        counts: dict[Node, int] = {}
        steps = 0
        for request in self._core.planner.prefilling + self._core.planner.decoding:
            path: list[Node] = []
            node = request.lock
            while node is not None and node not in found and node not in nearest:
                path.append(node)
                node = node.parent
            item = None if node is None else found.get(node) or nearest[node]
            nearest.update(dict.fromkeys(path, item))
            if item is not None:
                counts[item.node] = counts.get(item.node, 0) + 1
            steps += len(path) + 1
            if steps >= PIECE:
                yield
                steps = 0
        for listed, count in counts.items():
            above: Node | None = listed
            while above is not None:
                if above in found:
                    found[above].users += count
                above = above.parent

    def _describe(self, found: _Found, now: float) -> CachedPrefix:
        node = found.node
        # With the namespace: that two tenants have sent the same is nobody's business.
        first = found.namespace.encode() + b"\0" + node.key[: 4 * self._core.kv.block_size]
        digest = hashlib.blake2b(first, digest_size=6, key=self._key).hexdigest()
        # The first mark that is not before the use: it was no later than that.
        index = bisect_left(self._marks, (node.last_used,))
        used_by = self._marks[index][1] if index < len(self._marks) else now
        return CachedPrefix(
            digest,
            found.namespace,
            len(node.blocks),
            found.end,
            node.on_host,
            len(node.children),
            found.users,
            node.uses,
            max(0.0, now - used_by),
        )


def _describe_request(request: Request, now: float) -> LiveRequest:
    if request.row < 0:
        state: Literal["waiting", "prefill", "decode"] = "waiting"
    else:
        state = "prefill" if request.num_planned < request.num_known else "decode"
    return LiveRequest(
        request.external_id or str(request.request_id),
        request.tenant,
        state,
        request.num_prompt,
        max(0, request.cached_tokens),
        request.num_planned,
        request.num_outputs,
        max(0.0, now - request.arrival),
        request.preemptions,
    )
