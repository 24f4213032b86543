"""Copies of KV blocks between the pool and the host tier: what they move, beside what, and what is refused."""

import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.backends import make_backend
from gpu_workers.comm import Comm, LocalComm
from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner
from ipc.codec import unpack_ints
from ipc.engine_messages import StepPlan, StepResult
from tests.unit.gpu_workers.plans import HashModel, LogitsModel, new_row, plan
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4
PATIENCE = 30.0  # seconds; only reached when something is broken


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class Pools:
    """A pool with a host tier, driven by the copies of plans alone; every block starts as random bits, NaN included."""

    def __init__(self, kernels: str = "torch", dtype: str = "float32", comm: Comm | None = None) -> None:
        backend = make_backend("cpu", dtype, 1, True, kernels)
        self.kv = backend.allocate_kv(2, NUM_BLOCKS, 4, num_kv_heads=3, head_dim=6)
        # [layers, blocks, ...], views of the pools' bytes
        if kernels == "native":
            self.parts = [torch.from_numpy(self.kv.pool).transpose(0, 1)]
        else:
            self.parts = [pool.view(torch.uint8).transpose(1, 2) for pool in (self.kv.k, self.kv.v)]
        noise = torch.Generator().manual_seed(1)
        for part in self.parts:
            part.random_(0, 256, generator=noise)
        host_kv = backend.allocate_host_kv(self.kv, NUM_HOST_BLOCKS)
        model = SimpleNamespace(arch=SimpleNamespace(vocab_size=9), backend=backend)
        self.runner = Runner(model, self.kv, NUM_BLOCKS, 4, 2, 16, comm or LocalComm(), host_kv, NUM_HOST_BLOCKS)

    def block(self, index: int) -> tuple[bytes, ...]:
        """K and V of all layers and heads."""
        return tuple(part[:, index].contiguous().numpy().tobytes() for part in self.parts)

    def clear(self, index: int) -> None:
        for part in self.parts:
            part[:, index] = 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_comes_back_bit_for_bit(dtype: str, kernels: str) -> None:
    pools = Pools(kernels, dtype)
    before = [pools.block(index) for index in range(NUM_BLOCKS)]
    assert len(set(before)) == NUM_BLOCKS
    assert pools.runner.execute(plan(0, outs=[(1, 3), (5, 0)])) == StepResult(step=0, token_ids=b"")
    pools.clear(1)
    pools.runner.execute(plan(1, ins=[(3, 4), (0, 1)]))
    assert [pools.block(index) for index in range(NUM_BLOCKS)] == [
        before[0], before[5], before[2], before[3], before[1], before[5]
    ]  # fmt: skip


class SecondRank(LocalComm):
    rank, size = 1, 2


def test_a_rank_that_answers_nothing_copies_too() -> None:
    pools = Pools(comm=SecondRank())
    before = pools.block(2)
    assert pools.runner.execute(plan(0, outs=[(2, 2)])) is None
    assert pools.runner.execute(plan(1, ins=[(2, 0)])) is None
    assert pools.block(0) == before


ids = st.integers(0, NUM_HOST_BLOCKS - 1) | st.integers(-1, NUM_BLOCKS)
pairs = st.lists(st.tuples(ids, ids), max_size=3)


@settings(max_examples=100, deadline=None)
@given(plans=st.lists(st.tuples(pairs, pairs), min_size=1, max_size=6))
def test_any_copies_are_carried_out_or_refused(
    kernels: str, plans: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]
) -> None:
    """Against two dicts; a plan is refused exactly when an id is out of range or a block it writes is named again."""
    pools = Pools(kernels)
    device = {index: pools.block(index) for index in range(NUM_BLOCKS)}
    host = dict.fromkeys(range(NUM_HOST_BLOCKS), tuple(bytes(len(part)) for part in device[0]))
    for step, (outs, ins) in enumerate(plans):
        named = [("kv", block) for block, _ in outs] + [("host", block) for block, _ in ins]
        written = [("host", block) for _, block in outs] + [("kv", block) for _, block in ins]
        in_range = all(
            0 <= block < {"kv": NUM_BLOCKS, "host": NUM_HOST_BLOCKS}[pool] for pool, block in named + written
        )
        if not in_range or len(set(written)) < len(written) or set(written) & set(named):
            with pytest.raises(PlanError, match=r"^copies_(out|in): (host )?block id"):
                pools.runner.execute(plan(step, outs=outs, ins=ins))
            break
        pools.runner.execute(plan(step, outs=outs, ins=ins))
        host.update({host_block: device[block] for block, host_block in outs})
        device.update({block: host[host_block] for host_block, block in ins})
    assert {index: pools.block(index) for index in range(NUM_BLOCKS)} == device


@pytest.mark.parametrize(
    ("copies", "problem"),
    [
        ({"outs": [(6, 0)]}, "copies_out: block id 6 is outside 0..5"),
        ({"outs": [(0, 4)]}, "copies_out: host block id 4 is outside 0..3"),
        ({"ins": [(-1, 0)]}, "copies_in: host block id -1 is outside 0..3"),
        ({"ins": [(0, 7)]}, "copies_in: block id 7 is outside 0..5"),
        ({"outs": [(0, 1), (2, 1)]}, "copies_out: host block id 1 is written twice"),
        ({"ins": [(0, 5), (1, 5)]}, "copies_in: block id 5 is written twice"),
        ({"outs": [(0, 1)], "ins": [(1, 3)]}, "copies_out: host block id 1 is written and read in one plan"),
        ({"outs": [(3, 1)], "ins": [(0, 3)]}, "copies_in: block id 3 is written and read in one plan"),
    ],
)
def test_what_is_wrong_with_copies_is_said(copies: dict[str, list[tuple[int, int]]], problem: str) -> None:
    with pytest.raises(PlanError, match=f"^{problem}$"):
        Pools().runner.execute(plan(0, **copies))


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(PlanError, match="copies_in: 4 bytes are not whole entries of 2 int32"):
        Pools().runner.execute(StepPlan(0, (), b"", b"", b"", copies_in=bytes(4)))


class Meeting(HashModel):
    """A model whose forward and whose copies wait until the other has begun."""

    def __init__(self) -> None:
        super().__init__(101, 8, 4)
        self.both = threading.Barrier(2, timeout=PATIENCE)
        self.copied: list[list[list[int]]] = []
        self.calls: list[str] = []
        self.backend.begin_copies = lambda host_kv: self.calls.append("begin")
        self.backend.copy_blocks_out = self.backend.copy_blocks_in = self.copy

    def forward(self, batch, kv):
        self.calls.append("forward")
        self.both.wait()
        return super().forward(batch, kv)

    def copy(self, kv, host_kv, pairs) -> None:
        self.both.wait()
        threading.Event().wait(0.05)  # longer than the forward
        self.copied.append(pairs.tolist())


@pytest.mark.parametrize("copies", [{"outs": [(6, 2), (1, 0)]}, {"ins": [(2, 6), (0, 1)]}])
def test_copies_run_beside_the_forward_and_are_complete_when_it_is_answered(copies) -> None:
    model = Meeting()
    runner = Runner(model, model.kv, 8, 4, 2, 32, LocalComm(), None, 4)
    result = runner.execute(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [3])], **copies))
    assert model.copied == [[list(pair) for pair in (copies.get("outs") or copies["ins"])]]
    assert model.calls == ["begin", "forward"], "a device's copies don't wait for the forward that they run beside"
    assert list(unpack_ints(result.token_ids)) == [int(model.logits_of([1, 2, 3]).argmax())]


def test_a_failing_step_waits_for_its_copies() -> None:
    model = Meeting()
    model.logits_of = lambda token_ids: torch.full((101,), torch.nan)
    runner = Runner(model, model.kv, 8, 4, 2, 32, LocalComm(), None, 4)
    with pytest.raises(FloatingPointError):
        runner.execute(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [3])], outs=[(6, 2)]))
    assert model.copied == [[[6, 2]]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_that_was_swapped_out_and_in_has_the_same_logits(dtype: str, kernels: str, tmp_path: Path) -> None:
    """A real model: blocks go out beside another request's decode, are overwritten by its prefill, and come back."""
    save_tiny(tmp_path)
    model = load_tiny(tmp_path, dtype, kernels=kernels)
    draw = random.Random(4)
    prompt = [draw.randrange(131) for _ in range(70)]
    other = [draw.randrange(131) for _ in range(79)]
    seen: list[torch.Tensor] = []

    def forward(batch, kv):
        logits = model.forward(batch, kv)
        seen.append(logits.clone())
        return logits

    def make_runner() -> Runner:
        kv = model.allocate_kv(20, 16)
        host_kv = model.backend.allocate_host_kv(kv, 8)
        recorded = LogitsModel()
        recorded.arch, recorded.backend, recorded.forward = model.arch, model.backend, forward
        return Runner(recorded, kv, 20, 16, 2, 128, LocalComm(), host_kv, 8)

    alone = make_runner()
    token = alone.execute(plan(0, [(0, 0, 70, 1)], new=[new_row(0, prompt, range(5))])).token_ids
    sequence = [*prompt, *unpack_ints(token)]
    alone.execute(plan(1, [(0, 70, 1, 1)]))
    alone.execute(plan(2, [(0, 71, 1, 1)]))
    expected = seen[1:]
    seen.clear()

    runner = make_runner()
    blocks, elsewhere, host = [9, 2, 14, 3, 7], [11, 19, 0, 1, 8], [5, 0, 7, 3, 1]
    runner.execute(plan(0, [(1, 0, 1, 1)], new=[new_row(1, other[:1], [10])]))
    runner.execute(plan(1, [(0, 0, 70, 1), (1, 1, 1, 1)], new=[new_row(0, prompt, blocks)]))
    runner.execute(plan(2, [(1, 2, 1, 1)], freed=[0], outs=zip(blocks, host, strict=True)))
    runner.execute(plan(3, [(1, 0, 79, 1)], freed=[1], new=[new_row(1, other, blocks)]))
    runner.execute(plan(4, [(1, 79, 1, 1)], ins=zip(host, elsewhere, strict=True)))
    seen.clear()
    resumed = new_row(0, sequence, elsewhere, num_prompt=70)
    runner.execute(plan(5, [(0, 70, 1, 1)], new=[resumed]))
    runner.execute(plan(6, [(0, 71, 1, 1)]))
    assert [bits(logits).equal(bits(before)) for logits, before in zip(seen, expected, strict=True)] == [True, True]
