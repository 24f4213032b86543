"""The runner against a model whose logits are a function of the whole sequence: any wrong index changes a token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.comm import LocalComm
from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner
from ipc.codec import unpack_ints
from ipc.engine_messages import StepPlan
from tests.unit.gpu_workers.plans import HashModel, new_row, plan, spec

VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS, MAX_LEN = 101, 4, 40, 4, 32


@pytest.fixture
def model() -> HashModel:
    return HashModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)


def make_runner(model: HashModel, comm=None) -> Runner:
    return Runner(model, model.kv, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_LEN, comm or LocalComm())


def tokens(result) -> list[int]:
    return list(unpack_ints(result.token_ids))


def greedy(model: HashModel, prompt: list[int], n: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(n):
        sequence.append(int(torch.argmax(model.logits_of(sequence))))
    return sequence[len(prompt) :]


def test_prefill_then_decode(model):
    runner, prompt = make_runner(model), [5, 6, 7, 8, 9]
    out = tokens(runner.execute(plan(0, [(2, 0, 5, 1)], new=[new_row(2, prompt, [7, 3])])))
    for step in range(1, 4):
        out += tokens(runner.execute(plan(step, [(2, 4 + step, 1, 1)])))
    assert out == greedy(model, prompt, 4)


def test_chunks_and_late_blocks_give_the_same_tokens(model):
    runner, prompt = make_runner(model), list(range(10))
    assert tokens(runner.execute(plan(0, [(0, 0, 3, 0)], new=[new_row(0, prompt, [9])]))) == []
    assert tokens(runner.execute(plan(1, [(0, 3, 5, 0)], blocks=[(0, 1, 2)]))) == []
    out = tokens(runner.execute(plan(2, [(0, 8, 2, 1)], blocks=[(0, 2, 30), (0, 3, 1)])))
    assert out == greedy(model, prompt, 1)


def test_shared_prefix_blocks_are_read_not_computed(model):
    runner, prompt = make_runner(model), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    runner.execute(plan(0, [(0, 0, 9, 1)], new=[new_row(0, prompt, [10, 11, 12])]))
    other = [*prompt[:8], 50, 51]
    out = tokens(runner.execute(plan(1, [(1, 8, 2, 1)], new=[new_row(1, other, [10, 11, 20])])))
    assert out == greedy(model, other, 1)
    assert model.batches[-1].token_ids.tolist() == [50, 51]


def test_results_come_in_the_order_of_the_sampling_rows(model):
    runner = make_runner(model)
    prompts = {3: [1, 2], 0: [3, 4, 5], 1: [6]}
    new = [new_row(row, prompt, [row]) for row, prompt in prompts.items()]
    result = runner.execute(plan(0, [(1, 0, 1, 1), (3, 0, 1, 0), (0, 0, 3, 1)], new=new))
    assert tokens(result) == greedy(model, prompts[1], 1) + greedy(model, prompts[0], 1)


def test_a_preempted_row_goes_on_with_the_same_draws(model):
    sampling = spec(temperature=1.3, seed=2**63 + 5, repetition_penalty=1.4, frequency_penalty=0.7)
    prompt = [4, 4, 9]
    runner = make_runner(model)
    whole = tokens(runner.execute(plan(0, [(0, 0, 3, 1)], new=[new_row(0, prompt, range(8), sampling=sampling)])))
    for step in range(1, 12):
        whole += tokens(runner.execute(plan(step, [(0, 2 + step, 1, 1)])))

    again = make_runner(model)
    again.execute(plan(0, [(1, 0, 3, 1)], new=[new_row(1, prompt, range(8), sampling=sampling)]))
    resumed = new_row(1, prompt + whole[:6], range(20, 28), num_prompt=3, sampling=sampling)
    out = tokens(again.execute(plan(1, [(1, 0, 9, 1)], freed=[1], new=[resumed])))
    for step in range(2, 7):
        out += tokens(again.execute(plan(step, [(1, 7 + step, 1, 1)])))
    assert out == whole[6:]


def test_min_tokens_forbids_the_banned_ids_only_until_then(model):
    prompt = [8, 8]
    first, second = greedy(model, prompt, 2)
    sampling = spec(min_tokens=1, banned=[first, second])
    runner = make_runner(model)
    out = tokens(runner.execute(plan(0, [(0, 0, 2, 1)], new=[new_row(0, prompt, [0], sampling=sampling)])))
    assert out[0] not in (first, second)
    wanted = greedy(model, prompt + out, 1)[0]
    sampling = spec(min_tokens=1, banned=[wanted])
    runner = make_runner(model)
    resumed = new_row(0, prompt + out, [0], num_prompt=2, sampling=sampling)
    assert tokens(runner.execute(plan(0, [(0, 0, 3, 1)], new=[resumed]))) == [wanted]


def test_a_plan_that_runs_nothing_is_answered(model):
    runner = make_runner(model)
    runner.execute(plan(7, [(0, 0, 1, 1)], new=[new_row(0, [1], [0])]))
    result = runner.execute(plan(8, freed=[0]))
    assert (result.step, result.token_ids) == (8, b"")
    assert len(model.batches) == 1


def test_a_row_at_the_limit_runs_once_more_in_vain(model):
    runner, prompt = make_runner(model), [1] * (MAX_LEN - 1)
    runner.execute(plan(0, [(0, 0, MAX_LEN - 1, 1)], new=[new_row(0, prompt, range(8))]))
    assert len(tokens(runner.execute(plan(1, [(0, MAX_LEN - 1, 1, 1)])))) == 1
    with pytest.raises(PlanError, match="more than 32 tokens"):
        runner.execute(plan(2, [(0, MAX_LEN, 1, 0)], blocks=[(0, 8, 8)]))


START = plan(0, [(0, 0, 6, 1)], new=[new_row(0, [1, 2, 3, 4, 5, 6], [0, 1])])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (plan(2), "step 2 was planned after step 0"),
        (plan(0), "step 0 was planned after step 0"),
        (plan(1, freed=[1]), "row 1 is not in use"),
        (plan(1, freed=[-1]), "row -1 is outside"),
        (plan(1, new=[new_row(0, [1], [2])]), "row 0 is still in use"),
        (plan(1, new=[new_row(MAX_SEQS, [1], [2])]), "row 4 is outside 0..3"),
        (plan(1, new=[new_row(1, [VOCAB], [2])]), "token id 101 is outside 0..100"),
        (plan(1, new=[new_row(1, [-1], [2])]), "token id -1 is outside"),
        (plan(1, new=[new_row(1, [1], [NUM_BLOCKS])]), "block id 40 is outside 0..39"),
        (plan(1, new=[new_row(1, [1] * 33, [2])]), "has 33 tokens, at most 32 fit"),
        (plan(1, new=[new_row(1, [1], range(10))]), "has 10 blocks, at most 9 fit"),
        (plan(1, new=[new_row(1, [1], [2], num_prompt=2)]), "num_prompt 2 of 1 tokens"),
        (plan(1, new=[new_row(1, [1], [2], sampling=spec(bias={VOCAB: 1.0}))]), "bias id 101 is outside"),
        (plan(1, new=[new_row(1, [1], [2], sampling=spec(banned=[-3], min_tokens=1))]), "banned id -3 is outside"),
        (plan(1, new=[new_row(1, [1], [2], sampling=spec(bias={1: 1.0}, bias_values=b""))]), "as many as the values"),
        (plan(1, new=[new_row(1, [1], [2], sampling=spec(seed=-1))]), "seed -1"),
        (plan(1, new=[new_row(1, [1], [2], sampling=spec(logprobs=VOCAB + 1))]), "logprobs 102"),
        (plan(1, blocks=[(1, 0, 3)]), "row 1 is not in use"),
        (plan(1, blocks=[(0, 3, 3)]), "do not continue"),
        (plan(1, blocks=[(0, 1, 3)]), "do not continue"),
        (plan(1, blocks=[(0, 2, 3), (0, 2, 4)]), "do not continue"),
        (plan(1, blocks=[(0, -1, 3)]), "index -1 is outside"),
        (plan(1, blocks=[(0, 2, -7)]), "block id -7 is outside"),
        (plan(1, [(0, 6, 1, 1), (0, 6, 1, 1)]), "a row occurs twice"),
        (plan(1, [(3, 0, 1, 1)]), "row 3 is not in use"),
        (plan(1, [(0, 7, 1, 1)]), "tokens that are not known here"),
        (plan(1, [(0, -1, 1, 0)]), "start or count is out of range"),
        (plan(1, [(0, 5, 0, 0)]), "start or count is out of range"),
        (plan(1, [(0, 3, 2, 1)]), "a token is already known"),
        (plan(1, [(0, 6, 1, 2)]), "sample 2 is outside"),
        (StepPlan(1, (), b"", b"", b"\0" * 15), "15 bytes are not whole entries"),
        (StepPlan(1, (), b"\0", b"", b""), "freed_rows: 1 bytes"),
    ],
)
def test_bad_plans_are_refused(model, bad, problem):
    runner = make_runner(model)
    runner.execute(START)
    with pytest.raises(PlanError, match=problem):
        runner.execute(bad)


def test_positions_need_blocks(model):
    runner = make_runner(model)
    runner.execute(plan(0, [(0, 0, 4, 1)], new=[new_row(0, [1, 2, 3, 4], [5])]))
    with pytest.raises(PlanError, match="positions without a block"):
        runner.execute(plan(1, [(0, 4, 1, 1)]))


def test_nan_logits_are_an_error(model):
    runner = make_runner(model)
    model.logits_of = lambda token_ids: torch.full((VOCAB,), torch.nan)
    with pytest.raises(FloatingPointError, match="not numbers"):
        runner.execute(START)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_interleaving_gives_each_request_its_own_tokens(data):
    """Requests arrive, are chunked, preempted and resumed at random; each gets the tokens that it gets alone."""
    model = HashModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)
    runner = make_runner(model)
    free_blocks = list(range(NUM_BLOCKS))
    live: dict[int, dict] = {}
    finished = []
    ended: list[int] = []
    for step in range(25):
        freed, new, blocks, scheduled = ended, [], [], []
        ended = []
        for row in range(MAX_SEQS):
            action = data.draw(st.sampled_from(["run", "run", "run", "skip", "preempt"]))
            request = live.get(row)
            if request is None and action == "run":
                prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
                request = live[row] = {"tokens": prompt, "prompt": len(prompt), "done": 0, "blocks": None}
            elif request is not None and action == "preempt" and request["blocks"] is not None:
                freed.append(row)
                free_blocks += request["blocks"]
                request.update(done=0, blocks=None)
                continue
            if request is None or action != "run":
                continue
            if request["blocks"] is None:
                request["blocks"] = [free_blocks.pop()]
                new.append(new_row(row, request["tokens"], request["blocks"], num_prompt=request["prompt"]))
            missing = len(request["tokens"]) - request["done"]
            count = data.draw(st.integers(1, missing))
            while len(request["blocks"]) * BLOCK_SIZE < request["done"] + count:
                blocks.append((row, len(request["blocks"]), free_blocks[-1]))
                request["blocks"].append(free_blocks.pop())
            scheduled.append((row, request["done"], count, int(count == missing)))
            request["done"] += count
        sampled = iter(tokens(runner.execute(plan(step, scheduled, new=new, freed=freed, blocks=blocks))))
        for row, _, _, sample in scheduled:
            if sample:
                live[row]["tokens"].append(next(sampled))
                if len(live[row]["tokens"]) >= 16:
                    finished.append(live.pop(row))
                    free_blocks += finished[-1]["blocks"]
                    ended.append(row)
        assert next(sampled, None) is None
    for request in [*live.values(), *finished]:
        prompt, out = request["tokens"][: request["prompt"]], request["tokens"][request["prompt"] :]
        assert out == greedy(model, prompt, len(out))


class Ranks(LocalComm):
    """Two ranks, run one after the other: the second is handed what the first broadcast."""

    size = 2

    def __init__(self, rank: int, wire: list[torch.Tensor]) -> None:
        self.rank = rank
        self.wire = wire

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.wire.append(x.clone())
        return self.wire[-1]


def test_other_ranks_take_the_tokens_of_rank_0(model):
    wire: list[torch.Tensor] = []
    second_model = HashModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)
    first, second = make_runner(model, Ranks(0, wire)), make_runner(second_model, Ranks(1, wire))
    plans = [plan(0, [(0, 0, 2, 1)], new=[new_row(0, [1, 2], [0], sampling=spec(temperature=2.0, seed=3))])]
    plans += [plan(step, [(0, 1 + step, 1, 1)]) for step in (1, 2)]
    for step in plans:
        assert first.execute(step) is not None
        assert second.execute(step) is None
    np.testing.assert_array_equal(model.kv, second_model.kv)
    assert len({int(batch.token_ids[-1]) for batch in model.batches}) > 1


def test_the_token_sampled_in_one_step_is_the_input_of_the_next(model):
    runner = make_runner(model)
    sampled = tokens(runner.execute(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [7, 8, 9], [1])])))
    runner.execute(plan(1, [(0, 3, 1, 1)]))
    batch = model.batches[-1]
    assert batch.token_ids.tolist() == sampled
    assert batch.positions.tolist() == [3]
    assert batch.slots.tolist() == [1 * BLOCK_SIZE + 3]
    assert (batch.query_starts, batch.context_lens) == ([0, 1], [4])
    assert batch.block_tables.tolist() == [[1]]
