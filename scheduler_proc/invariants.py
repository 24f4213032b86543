"""What must hold in the scheduler whenever it is at rest; the tests check it after every event."""

from scheduler_proc.core import SchedulerCore
from scheduler_proc.radix_tree import Node
from scheduler_proc.request import State


def _blocks_to_root(node: Node | None) -> set[int]:
    blocks: set[int] = set()
    while node is not None:
        blocks.update(node.blocks)
        node = node.parent
    return blocks


def violations(core: SchedulerCore) -> list[str]:
    """Everything that is wrong with the blocks, locks, rows and queues; empty when all is well."""
    found: list[str] = []
    kv, planner = core.kv, core.planner
    nodes = list(kv.tree.nodes())
    owners: dict[int, list[str]] = {}
    for block in kv.pool.free_ids():
        owners.setdefault(block, []).append("free")
    for block in kv.pool.in_transit_ids():
        owners.setdefault(block, []).append("in transit")
    for node in nodes:
        for block in node.blocks:
            owners.setdefault(block, []).append("cached")
    for request in core.requests.values():
        for block in request.private_blocks:
            owners.setdefault(block, []).append(f"private to {request.request_id}")
    for block in range(kv.pool.total):
        if len(owners.get(block, ())) != 1:
            found.append(f"block {block} is {' and '.join(owners.get(block, ['lost']))}")
    if set(owners) - set(range(kv.pool.total)):
        found.append("block ids outside the pool")
    total = kv.pool.num_free + kv.tree.num_blocks + kv.num_private + kv.pool.num_in_transit
    if total != kv.pool.total:
        found.append(f"counts add up to {total} of {kv.pool.total} blocks")

    locks: dict[int, int] = {}
    for request in core.requests.values():
        held: Node | None = request.lock
        if len(set(request.block_table)) != len(request.block_table):
            found.append(f"request {request.request_id} has a block twice")
        if not request.private_blocks <= set(request.block_table):
            found.append(f"request {request.request_id} keeps private blocks outside its table")
        shared = set(request.block_table) - request.private_blocks
        if shared != _blocks_to_root(held):
            found.append(f"request {request.request_id} holds other blocks of the tree than it uses")
        while held is not None:
            locks[id(held)] = locks.get(id(held), 0) + 1
            held = held.parent
    for node in nodes:
        if node.locks != locks.get(id(node), 0):
            found.append(f"a node has {node.locks} locks, requests hold {locks.get(id(node), 0)}")
        if len(node.key) != len(node.blocks) * kv.block_size * 4 or not node.blocks:
            found.append(f"a node has {len(node.blocks)} blocks for {len(node.key)} bytes of ids")
    if kv.tree.num_locked_blocks != sum(len(node.blocks) for node in nodes if node.locks):
        found.append(f"{kv.tree.num_locked_blocks} blocks are counted as locked")

    rows = [request.row for _, request in planner.running]
    if len(set(rows)) != len(rows) or min(rows, default=0) < 0:
        found.append(f"rows are shared or missing: {rows}")
    for queue, state in ((planner.waiting, State.WAITING), (planner.running, State.RUNNING)):
        if [order for order, _ in queue] != sorted(order for order, _ in queue):
            found.append(f"the {state.name} queue is out of order")
        if any(request.state is not state for _, request in queue):
            found.append(f"a request in the {state.name} queue is in another state")
    if len(planner.waiting) + len(planner.running) != len(core.requests):
        found.append("a request is in no queue or in two")
    if core.requests and not core.steps_in_flight:
        found.append(f"{len(core.requests)} requests are here and no step runs: nothing would ever happen again")
    return found
