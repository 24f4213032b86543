"""What must hold in the scheduler whenever it is at rest; the tests check it after every event."""

from collections.abc import Iterator

from scheduler_proc.core import SchedulerCore
from scheduler_proc.radix_tree import Node
from scheduler_proc.request import Request, State


def violations(core: SchedulerCore) -> list[str]:
    """Everything that is wrong with the blocks, locks, rows and queues; empty when all is well."""
    return [*_block_violations(core), *_lock_violations(core), *_queue_violations(core)]


def _running(core: SchedulerCore) -> list[Request]:
    return core.planner.prefilling + core.planner.decoding


def _path(node: Node | None) -> list[Node]:
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path


def _block_violations(core: SchedulerCore) -> Iterator[str]:
    """free + cached + private + in transit == total in both pools, and each block is there once."""
    kv = core.kv
    nodes = list(kv.tree.nodes())
    cached = [block for node in nodes if not node.on_host for block in node.blocks]
    on_host = [block for node in nodes if node.on_host for block in node.blocks]
    private = [block for request in _running(core) for block in request.block_table[request.num_shared :]]
    device = {"free": kv.pool.free_ids(), "in transit": kv.pool.in_transit_ids(), "cached": cached, "private": private}
    host = {"free": kv.host.free_ids(), "in transit": kv.host.in_transit_ids(), "cached": on_host}
    for name, total, places in (("block", kv.pool.total, device), ("host block", kv.host.total, host)):
        owners: dict[int, list[str]] = {}
        for place, blocks in places.items():
            for block in blocks:
                owners.setdefault(block, []).append(place)
        for block in range(total):
            if len(owners.get(block, ())) != 1:
                yield f"{name} {block} is {' and '.join(owners.get(block, ['lost']))}"
        if set(owners) - set(range(total)):
            yield f"{name} ids outside the pool"
    counts = kv.pool.num_free, kv.tree.num_blocks, kv.num_private, kv.pool.num_in_transit
    if sum(counts) != kv.pool.total or counts[1:3] != (len(cached), len(private)):
        yield f"the counts {counts} do not add up to {kv.pool.total} blocks"
    if kv.tree.num_host_blocks != len(on_host):
        yield f"{kv.tree.num_host_blocks} host blocks are counted, the tree has {len(on_host)}"
    promised = sum(request.promised for request in core.requests.values())
    if kv.num_promised != promised or any(request.promised < 0 for request in core.requests.values()):
        yield f"{kv.num_promised} blocks are promised, requests have {promised}"
    if kv.num_available < 0:
        yield f"{-kv.num_available} more blocks are promised than there are"


def _lock_violations(core: SchedulerCore) -> Iterator[str]:
    """Requests use the tree's blocks exactly as far as their lock says, and the locks are counted right."""
    kv = core.kv
    nodes = list(kv.tree.nodes())
    holds: dict[int, int] = {}  # of this very node
    held: set[int] = set()  # this node or one below it
    for holder in [request.lock for request in _running(core)] + kv.pins.nodes():
        if holder is not None:
            holds[id(holder)] = holds.get(id(holder), 0) + 1
            held.update(id(node) for node in _path(holder))
    for request in _running(core):
        shared = [block for node in reversed(_path(request.lock)) for block in node.blocks]
        if shared != request.block_table[: request.num_shared]:
            yield f"request {request.request_id} holds other blocks of the tree than it uses"
        if len(set(request.block_table)) != len(request.block_table):
            yield f"request {request.request_id} has a block twice"
        if request.capacity != len(request.block_table) * kv.block_size or request.num_planned > request.capacity:
            yield f"request {request.request_id} has planned {request.num_planned} of {request.capacity} positions"
    for node in nodes:
        locks = holds.get(id(node), 0) + sum(id(child) in held for child in node.children.values())
        if node.locks != locks:
            yield f"a node has {node.locks} locks, requests, pins and nodes below hold {locks}"
        if len(node.key) != len(node.blocks) * kv.block_size * 4 or not node.blocks:
            yield f"a node has {len(node.blocks)} blocks for {len(node.key)} bytes of ids"
        if node.on_host and (node.locks or any(not child.on_host for child in node.children.values())):
            yield "a node on the host is locked, or has a child on the device"
    pinned = {id(node) for holder in kv.pins.nodes() for node in _path(holder)}
    blocks = sum(len(node.blocks) for node in nodes if id(node) in pinned)
    if kv.pins.num_blocks != blocks or any(bool(node.pins) != (id(node) in pinned) for node in nodes):
        yield f"{kv.pins.num_blocks} blocks are counted as pinned, pins hold {blocks}"
    if kv.tree.num_locked_blocks != sum(len(node.blocks) for node in nodes if node.locks):
        yield f"{kv.tree.num_locked_blocks} blocks are counted as locked"


def _queue_violations(core: SchedulerCore) -> Iterator[str]:
    planner = core.planner
    rows = [request.row for request in _running(core)]
    if len(set(rows)) != len(rows) or min(rows, default=0) < 0:
        yield f"rows are shared or missing: {rows}"
    waiting = list(planner.policy)
    if len(waiting) != len(planner.policy):
        yield f"the policy counts {len(planner.policy)} waiting requests and has {len(waiting)}"
    if any(request.state is not State.WAITING or request.block_table or request.lock for request in waiting):
        yield "a waiting request is in another state or holds blocks"
    for name, queue in (("prefilling", planner.prefilling), ("decoding", planner.decoding)):
        if [request.key for request in queue] != sorted(request.key for request in queue):
            yield f"the {name} requests are out of order"
        if any(request.state is not State.RUNNING for request in queue):
            yield f"a request among the {name} ones does not run"
    if any(request.num_planned >= request.num_known for request in planner.prefilling):
        yield "a prefilling request has nothing left to prefill"
    if any(request.num_planned < request.num_known for request in planner.decoding):
        yield "a decoding request has not been prefilled"
    known = {id(request) for request in core.requests.values()}
    if known != {id(request) for request in waiting + planner.prefilling + planner.decoding}:
        yield "a request is in no queue, in two, or has ended"
    tokens = sum(request.num_prompt for request in waiting if request.cached_tokens < 0)
    if tokens != core.checks.queued_tokens:
        yield f"{core.checks.queued_tokens} waiting tokens are counted, there are {tokens}"
    if core.requests and core.engine_ready and not core.steps_in_flight and core.wake_at is None:
        yield f"{len(core.requests)} requests are here and no step runs: nothing would ever happen again"
