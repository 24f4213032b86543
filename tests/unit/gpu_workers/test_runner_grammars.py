"""Constrained rows under the real scheduler and runner: preempted, lost or beside others, their tokens are the same."""

import json
from pathlib import Path

import pytest
import torch

from config.grammar import TokenTable, write_token_table
from gpu_workers.comm import LocalComm
from gpu_workers.grammars import Grammars
from gpu_workers.runner import Runner
from ipc.engine_messages import SamplingSpec
from tests.unit.gpu_workers.plans import spec
from tests.unit.gpu_workers.test_runner_scheduler import MAX_MODEL_LEN, DigestModel
from tests.unit.scheduler_proc.engine import Engine
from tests.unit.scheduler_proc.fake_worker import VOCABULARY

TOKENS = [b"<eos>", *(bytes([ord("a") + i]) for i in range(26)), *(b"%d" % i for i in range(10)), b"ab", b"1,"]
TABLE = TokenTable([*TOKENS, *(b"_%d" % i for i in range(VOCABULARY - len(TOKENS)))], [0], [0])
PATTERNS = ("[a-z]{12,20}", "([0-9]+[a-z]){6}", "[ab1]{9}", "(a|b|ab){5,}z", "[0-9,]{4,30}")


def sampling(number: int) -> SamplingSpec:
    """Every third is greedy, the others are drawn; every fifth is free."""
    lark = f'start: /{PATTERNS[number % len(PATTERNS)]}/\n%llguidance {{"no_forcing": true}}\n'
    grammar = "" if number % 5 == 4 else json.dumps({"grammars": [{"lark_grammar": lark}]})
    return spec(temperature=0.0 if number % 3 == 0 else 1.0, seed=number, grammar=grammar)


class Bench:
    """The scheduler with runners that share nothing but the token table."""

    def __init__(self, table: Path, num_blocks: int, max_seqs: int) -> None:
        self.engine = Engine(
            num_blocks=num_blocks, max_seqs=max_seqs, max_step_tokens=16, prefill_chunk=5, max_model_len=MAX_MODEL_LEN
        )

        def runner() -> Runner:
            model = DigestModel(num_blocks, 4)
            grammars = Grammars(table, VOCABULARY)
            return Runner(model, model.kv, num_blocks, 4, max_seqs, MAX_MODEL_LEN, LocalComm(), grammars=grammars)

        self.runner = runner
        self.engine.worker = runner()

    def lose_worker(self) -> None:
        """As `Engine.lose_engine`, for a runner, which takes the first step's number from its first plan."""
        self.engine.plans.clear()
        self.engine.worker.next_step = 0
        self.engine.new_worker = self.runner
        self.engine.lose_engine()
        self.engine.recover()

    def outcome(self) -> dict[int, tuple[str, list[int]]]:
        while self.engine.step():
            pass
        assert not self.engine.core.requests
        return {number: (end, self.engine.outputs[number]) for number, end in self.engine.ends.items()}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tokens"
    write_token_table(path, TABLE)
    return path


@pytest.fixture(scope="module")
def alone(table: Path) -> dict[int, tuple[str, list[int]]]:
    """Each request by itself."""
    torch.set_num_threads(1)
    found = {}
    for number in range(10):
        bench = Bench(table, 40, 2)
        submit(bench, number)
        found |= bench.outcome()
    assert {end for end, _ in found.values()} == {"stop", "length"}
    return found


def submit(bench: Bench, number: int) -> None:
    bench.engine.submit(number, [1 + number, 2, 3], 30, (0,), sampling=sampling(number))


def test_a_preempted_row_goes_on_as_if_nothing_had_happened(
    table: Path, alone: dict[int, tuple[str, list[int]]]
) -> None:
    bench = Bench(table, 14, 6)
    for number in range(10):
        submit(bench, number)
    assert bench.outcome() == alone
    assert bench.engine.core.planner.num_preemptions > 0


@pytest.mark.parametrize("steps", [3, 9, 14])
def test_so_does_a_row_whose_worker_died(table: Path, alone: dict[int, tuple[str, list[int]]], steps: int) -> None:
    bench = Bench(table, 60, 6)
    for number in range(10):
        submit(bench, number)
    for _ in range(steps):
        bench.engine.step()
    bench.lose_worker()
    assert bench.outcome() == alone


def test_a_grammar_that_fails_ends_its_request_alone(table: Path, alone: dict[int, tuple[str, list[int]]]) -> None:
    bench = Bench(table, 60, 6)
    for number in range(4):
        submit(bench, number)
    bench.engine.submit(4, [1, 2], 30, (0,), sampling=spec(grammar="no grammar at all"))
    bench.engine.submit(5, [1, 2], 30, (0,), sampling=spec(grammar=sampling(0).grammar, bias={1: 5.0}, banned=[]))
    while bench.engine.step():
        pass
    assert bench.engine.ends[4] == "failed"
    assert bench.engine.failures[4].param == "grammar"
    assert {number: (bench.engine.ends[number], bench.engine.outputs[number]) for number in range(4)} == {
        number: alone[number] for number in range(4)
    }
    text = b"".join(TOKENS[token] for token in bench.engine.outputs[5])
    assert set(text) == {ord("a")}
