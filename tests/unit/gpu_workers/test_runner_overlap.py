"""A step is launched before the one in front of it is collected: the same tokens, and nobody else's.

The device of these tests keeps what it samples; the host has ids only of steps that were collected.
"""

import random
from collections.abc import Callable

import pytest

from gpu_workers.comm import LocalComm
from gpu_workers.rows import UNKNOWN
from gpu_workers.runner import Runner, Step
from ipc.codec import pack_ints, unpack_ints
from ipc.engine_messages import SamplingSpec, StepPlan, StepResult
from tests.unit.gpu_workers.plans import HashModel, new_row, overlapping_backend, plan, spec
from tests.unit.gpu_workers.test_runner_scheduler import MAX_MODEL_LEN, DigestModel
from tests.unit.scheduler_proc.engine import Engine
from tests.unit.scheduler_proc.fake_worker import VOCABULARY


class Pipelined:
    """Carries out an engine's plans as the rank's loop does: the next one, if it is there, before the last is told."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self._engine = engine
        self._runner = runner
        self._launched: Step | None = None
        self.overlapped = 0

    def execute(self, this: StepPlan) -> StepResult:
        step = self._launched
        if step is None:
            step = self._runner.launch(this)
            self._runner.sample(step)
        assert step.plan is this
        self._launched = self._runner.launch(self._engine.plans[0]) if self._engine.plans else None
        result = self._runner.collect(step)
        if self._launched is not None:
            self._runner.sample(self._launched)
            self.overlapped += 1
        assert result is not None
        return result


def make_engine(num_blocks: int, max_seqs: int, chunk: int, model_of: Callable[[], HashModel | DigestModel]) -> Engine:
    engine = Engine(
        num_blocks=num_blocks, max_seqs=max_seqs, max_step_tokens=16, prefill_chunk=chunk, max_model_len=MAX_MODEL_LEN
    )
    model = model_of()
    runner = Runner(model, model.kv, num_blocks, 4, max_seqs, MAX_MODEL_LEN, LocalComm())
    engine.worker = Pipelined(engine, runner) if runner.overlaps else runner
    return engine


def play(engine: Engine, seed: int, samplings: list[SamplingSpec]) -> None:
    """Random arrivals, aborts and stops over a pool so small that requests are preempted and the cache is evicted."""
    draw = random.Random(seed)
    prefix = [draw.randrange(1, VOCABULARY) for _ in range(12)]
    for request_id in range(40):
        prompt = prefix[: draw.choice([0, 8, 12])] + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
        stops = draw.choice([(0,), ()])
        most = draw.randrange(1, MAX_MODEL_LEN - len(prompt) + 1)
        engine.submit(request_id, prompt, most, stops, sampling=samplings[request_id % len(samplings)])
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.1:
            engine.abort(draw.randrange(request_id + 1))
    while engine.step():
        pass


@pytest.mark.parametrize("seed", range(12))
def test_greedy_histories_of_the_real_scheduler(seed: int) -> None:
    draw = random.Random(seed)
    blocks, chunk = draw.choice([12, 20, 60]), draw.choice([3, 16])

    def model() -> DigestModel:
        made = DigestModel(blocks, 4)
        made.backend = overlapping_backend()
        return made

    engine = make_engine(blocks, 4, chunk, model)
    play(engine, seed, [spec()])
    engine.check_idle()  # it knows what each request has to get
    assert engine.worker.overlapped > 20


SAMPLINGS = [
    spec(),
    spec(temperature=1.0, seed=3),
    spec(temperature=0.8, seed=4, top_k=5, logprobs=2),
    spec(repetition_penalty=1.7),
    spec(temperature=1.0, seed=9, presence_penalty=1.5, frequency_penalty=0.7, logprobs=0),
    spec(bad_words=(pack_ints([3, 4]), pack_ints([7]), pack_ints([1, 2, 3]))),
    spec(bias={5: 3.0}, banned=[0], min_tokens=4),
]


@pytest.mark.parametrize("seed", range(6))
def test_the_same_tokens_as_one_step_after_the_other(seed: int) -> None:
    """Penalties and bad words look at tokens that the host learns while the next forward runs already."""
    ends = []
    for overlaps in (False, True):

        def model(overlaps: bool = overlaps) -> HashModel:
            made = HashModel(VOCABULARY, 20, 4)
            if overlaps:
                made.backend = overlapping_backend()
            return made

        engine = make_engine(20, 4, 16, model)
        play(engine, seed, SAMPLINGS)
        ends.append({key: value for key, value in engine.outputs.items() if key not in engine.silenced})
    assert ends[0] == ends[1]
    assert len(ends[0]) > 25


def overlapping_runner() -> Runner:
    model = HashModel(101, 16, 4)
    model.backend = overlapping_backend()
    return Runner(model, model.kv, 16, 4, 2, 32, LocalComm())


def test_a_row_given_to_another_request_keeps_that_ones_tokens() -> None:
    """What the first request's last step sampled, arrives when the row is the second one's."""
    runner = overlapping_runner()
    first = runner.launch(plan(0, [(0, 0, 2, 1)], new=[new_row(0, [1, 2], [0])]))
    other = [5, 6, 7, 8]
    second = runner.launch(plan(1, [(0, 0, 2, 0)], freed=[0], new=[new_row(0, other, [1])]))
    runner.collect(first)
    runner.sample(second)
    third = runner.launch(plan(2, [(0, 2, 2, 1)]))
    runner.collect(second)
    runner.sample(third)
    result = runner.collect(third)
    expected = int(HashModel(101, 16, 4).logits_of(other).argmax())
    assert unpack_ints(result.token_ids).tolist() == [expected]


def test_the_host_learns_what_the_device_sampled() -> None:
    runner = overlapping_runner()
    first = runner.launch(plan(0, [(0, 0, 2, 1)], new=[new_row(0, [1, 2], [0])]))
    assert runner._rows.tokens[0, 2] == UNKNOWN
    assert not runner.ready(first)
    assert runner.ready(first)
    sampled = unpack_ints(runner.collect(first).token_ids)[0]
    assert runner._rows.tokens[0, 2] == sampled


def test_a_plan_of_copies_alone_is_answered_in_its_turn() -> None:
    runner = overlapping_runner()
    first = runner.launch(plan(0, [(0, 0, 2, 1)], new=[new_row(0, [1, 2], [0])]))
    nothing = runner.launch(plan(1))
    assert runner.collect(first).step == 0
    runner.sample(nothing)
    last = runner.launch(plan(2, [(0, 2, 1, 1)]))
    assert (runner.collect(nothing).step, runner.ready(nothing)) == (1, True)
    runner.sample(last)
    tokens = [1, 2, int(HashModel(101, 16, 4).logits_of([1, 2]).argmax())]
    assert unpack_ints(runner.collect(last).token_ids)[0] == int(HashModel(101, 16, 4).logits_of(tokens).argmax())
