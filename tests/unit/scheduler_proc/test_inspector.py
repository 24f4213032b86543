"""What people are shown of requests and of the prefix tree, against a plain walk through all of it."""

import hashlib
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.stats_messages import CachedPrefix
from scheduler_proc import inspector as module
from scheduler_proc.inspector import MAX_PREFIXES, MAX_REQUESTS, Inspector
from scheduler_proc.radix_tree import Node
from tests.unit.scheduler_proc.engine import PEER, Engine

KEY = bytes(range(32))
BLOCK = 4

prompts = st.builds(
    lambda head, middle, tail: [1] * head + [2] * middle + tail,
    st.integers(0, 12),
    st.integers(0, 9),
    st.lists(st.integers(3, 5), min_size=1, max_size=8),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.sampled_from(["", "tenant"])),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("look"), st.integers(1, 3)),
        st.tuples(st.just("lose")),
    ),
    max_size=40,
)


def full_walk(inspector: Inspector) -> None:
    """Finish the walk under way, if there is one, and make another."""
    for _ in range(2):
        inspector.advance()
        while inspector._walk is not None:
            inspector.advance()


def described(engine: Engine, node: Node) -> tuple[object, ...]:
    """What a report says of a node, but for its times."""
    path = []
    above: Node | None = node
    while above is not None:
        path.append(above)
        above = above.parent
    namespace = path[-1].key
    digest = hashlib.blake2b(namespace + b"\0" + node.key[: 4 * BLOCK], digest_size=6, key=KEY).hexdigest()
    end = sum(len(each.blocks) for each in path) * BLOCK
    return digest, namespace.decode(), len(node.blocks), end, node.on_host, len(node.children), node.uses


def reported(prefix: CachedPrefix) -> tuple[object, ...]:
    return (
        prefix.digest,
        prefix.namespace,
        prefix.blocks,
        prefix.end,
        prefix.on_host,
        prefix.children,
        prefix.uses,
    )


def users_of(engine: Engine, node: Node) -> int:
    count = 0
    for request in engine.core.requests.values():
        above = request.lock
        while above is not None and above is not node:
            above = above.parent
        count += above is node
    return count


@given(actions, st.integers(1, 5), st.sampled_from([0, 12]))
def test_the_largest_nodes_are_those_of_a_plain_walk(
    done: list[tuple[object, ...]], piece: int, num_host_blocks: int
) -> None:
    engine = Engine(
        num_blocks=40, num_host_blocks=num_host_blocks, kv_shortage="swap" if num_host_blocks else "recompute"
    )
    inspector = Inspector(engine.core, KEY)
    next_id = 0
    with patch.object(module, "PIECE", piece), patch.object(module, "MAX_PREFIXES", 4):
        for action in done:
            match action:
                case ("submit", list(prompt), str(namespace)):
                    engine.submit(next_id, prompt, 6, namespace=namespace)
                    next_id += 1
                case ("step", int(count)):
                    for _ in range(count):
                        engine.step()
                case ("abort", int(request_id)) if (PEER, request_id) in engine.core.requests:
                    engine.abort(request_id)
                case ("look", int(count)):
                    for _ in range(count):
                        inspector.advance()
                case ("lose",):
                    engine.lose_engine()
                    engine.recover()
            # A walk under way has missed what came since, but says nothing wrong.
            present = Counter(described(engine, node) for node in engine.core.kv.tree.nodes())
            said = Counter(reported(prefix) for prefix in inspector.details(engine.time, 0.0).prefixes)
            assert said <= present
        full_walk(inspector)
        details = inspector.details(engine.time, 0.0)
    nodes = list(engine.core.kv.tree.nodes())
    assert details.prefix_nodes == len(nodes)
    sizes = sorted((len(node.blocks) for node in nodes), reverse=True)
    assert [prefix.blocks for prefix in details.prefixes] == sizes[:4]
    expected = Counter((described(engine, node), users_of(engine, node)) for node in nodes)
    assert Counter((reported(prefix), prefix.users) for prefix in details.prefixes) <= expected


def test_a_walk_through_a_tree_that_is_cut_up_meanwhile_still_knows_where_nodes_end() -> None:
    engine = Engine(num_blocks=60, max_step_tokens=64)
    engine.submit(0, [1] * 8 + [2] * 40, 1)
    engine.submit(1, [3] * 40, 1)
    engine.run_to_idle()
    inspector = Inspector(engine.core, KEY)
    with patch.object(module, "PIECE", 1):
        inspector.advance()
        engine.submit(2, [1] * 8 + [2] * 20 + [4] * 4, 1)  # cuts the first prompt's node
        engine.submit(3, [3] * 20 + [4] * 4, 1)  # and the second one's
        engine.run_to_idle()
        while inspector._walk is not None:
            inspector.advance()
        said = [reported(prefix) for prefix in inspector.details(engine.time, 0.0).prefixes]
    assert said
    assert set(said) <= {described(engine, node) for node in engine.core.kv.tree.nodes()}


def test_no_more_is_told_than_fits_on_a_page_and_running_requests_come_first() -> None:
    engine = Engine(num_blocks=400, max_seqs=30, max_step_tokens=240)
    for request_id in range(80):
        engine.submit(
            request_id, [request_id // 10, 20 + request_id % 10] * 4, 20, (), external_id=f"r{request_id}", tenant="t"
        )
    for _ in range(4):
        engine.step()
    inspector = Inspector(engine.core, KEY)
    full_walk(inspector)
    details = inspector.details(engine.time, 123.0)
    assert details.time == 123.0
    assert [request.id for request in details.requests] == [f"r{number}" for number in range(MAX_REQUESTS)]
    states = [request.state for request in details.requests]
    assert states == ["decode"] * 30 + ["waiting"] * 20
    assert len(details.prefixes) == MAX_PREFIXES < details.prefix_nodes
    first, last = details.requests[0], details.requests[-1]
    assert (first.prompt_tokens, first.cached_tokens, first.tenant) == (8, 0, "t")
    assert first.generated_tokens == len(engine.outputs[0]) > 0
    assert (last.generated_tokens, last.computed_tokens) == (0, 0)
    assert first.age_seconds == pytest.approx(engine.time - 0.001)


def test_idle_time_is_counted_from_the_last_use_to_about_a_second() -> None:
    engine = Engine(num_blocks=60)
    inspector = Inspector(engine.core, KEY)
    inspector.mark(0.0)
    engine.submit(0, [1] * 8, 1)
    engine.run_to_idle()
    for second in range(1, 50):
        inspector.mark(float(second))
    full_walk(inspector)
    [prefix] = inspector.details(50.0, 0.0).prefixes
    assert prefix.idle_seconds == pytest.approx(49.0)
    assert prefix.users == 0
    engine.submit(1, [1] * 8 + [2] * 8, 3)
    engine.step()
    inspector.mark(51.0)
    full_walk(inspector)
    shared = max(inspector.details(51.5, 0.0).prefixes, key=lambda prefix: prefix.uses)
    assert (shared.users, shared.end) == (1, 8)
    assert shared.idle_seconds <= 1.0


def test_digests_of_two_starts_have_nothing_in_common() -> None:
    engine = Engine()
    engine.submit(0, [1] * 8, 1)
    engine.run_to_idle()
    digests = set()
    for key in (b"a" * 32, b"b" * 32):
        inspector = Inspector(engine.core, key)
        full_walk(inspector)
        digests |= {prefix.digest for prefix in inspector.details(0.0, 0.0).prefixes}
    assert len(digests) == 2
