"""Log-probabilities of prompts, against transformers on the same random model: whole, in chunks, and in a batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_workers.comm import LocalComm
from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner
from ipc.engine_messages import PromptScores, StepResult
from tests.unit.gpu_workers.plans import new_row, plan, spec
from tests.unit.gpu_workers.tiny import BLOCK_SIZE, load_tiny, save_tiny

PROMPT = [(7 * i * i + 3 * i) % 131 for i in range(60)]
BLOCKS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scored")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """[59, 131]: log-probabilities after each prefix of the prompt, by transformers."""
    model = save_tiny(checkpoint)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


def make_runner(checkpoint: Path, kernels: str) -> Runner:
    model = load_tiny(checkpoint, kernels=kernels)
    return Runner(model, model.allocate_kv(3 * BLOCKS, BLOCK_SIZE), 3 * BLOCKS, BLOCK_SIZE, 3, 128, LocalComm())


def run_in_chunks(runner: Runner, chunk: int, k: int, *, beside: bool = False) -> list[StepResult]:
    """The prompt in row 1, and with `beside` another request before and one behind it in each step."""
    new = [new_row(1, PROMPT, range(BLOCKS, 2 * BLOCKS), sampling=spec(prompt_logprobs=k, temperature=1.0))]
    if beside:
        new += [new_row(0, PROMPT[:20], range(BLOCKS)), new_row(2, PROMPT[20:23], range(2 * BLOCKS, 3 * BLOCKS))]
    results = []
    for step, start in enumerate(range(0, len(PROMPT), chunk)):
        count = min(chunk, len(PROMPT) - start)
        scheduled = [(1, start, count, int(start + count == len(PROMPT)))]
        if beside and step == 0:
            scheduled = [(0, 0, 13, 0), *scheduled, (2, 0, 3, 1)]
        results.append(runner.execute(plan(step, scheduled, new=new)))
        new = []
    runner.execute(plan(len(results), freed=[0, 1, 2] if beside else [1]))
    return results


def columns(results: list[StepResult], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of all tokens: log-probability, rank, ids and log-probabilities of the k best; they must be complete."""
    scores = [scores for result in results for scores in result.prompt_scores]
    known = 0
    for part in scores:
        assert part.first == known + 1
        known += len(part.chosen) // 4
    assert known == len(PROMPT) - 1
    return (
        np.frombuffer(b"".join(part.chosen for part in scores), dtype="<f4"),
        np.frombuffer(b"".join(part.ranks for part in scores), dtype="<i4"),
        np.frombuffer(b"".join(part.top_ids for part in scores), dtype="<i4").reshape(-1, k),
        np.frombuffer(b"".join(part.top_values for part in scores), dtype="<f4").reshape(-1, k),
    )


def test_values_ranks_and_alternatives_are_those_of_transformers(
    checkpoint: Path, expected: torch.Tensor, kernels: str
) -> None:
    chosen, ranks, ids, values = columns(run_in_chunks(make_runner(checkpoint, kernels), 60, 5), 5)
    targets = torch.tensor(PROMPT[1:])
    wanted = expected.gather(1, targets[:, None])
    assert np.allclose(chosen, wanted[:, 0], rtol=0, atol=1e-3)
    best = expected.topk(5)
    assert np.allclose(values, best.values, rtol=0, atol=1e-3)
    assert np.allclose(expected.gather(1, torch.from_numpy(ids.astype(np.int64))), values, rtol=0, atol=1e-3)
    clear = (expected - wanted).abs().where(expected != wanted, torch.inf).amin(-1) > 2e-3
    assert clear.sum() > 40
    assert (torch.from_numpy(ranks.copy()) == (expected > wanted).sum(-1) + 1)[clear].all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 59])
def test_b021_chunks_and_the_batch_change_no_bit(
    checkpoint: Path, expected: torch.Tensor, kernels: str, chunk: int
) -> None:
    runner = make_runner(checkpoint, kernels)
    whole = columns(run_in_chunks(runner, 60, 3), 3)
    for beside in (False, True):
        fresh = make_runner(checkpoint, kernels)
        for one, other in zip(whole, columns(run_in_chunks(fresh, chunk, 3, beside=beside), 3), strict=True):
            assert one.tobytes() == other.tobytes()


def test_a_row_that_comes_back_gives_what_is_missing(checkpoint: Path, expected: torch.Tensor, kernels: str) -> None:
    """As after a preemption: with a part of its prompt in reused blocks, and outputs behind the prompt."""
    runner = make_runner(checkpoint, kernels)
    sampling = spec(prompt_logprobs=0)
    table = range(BLOCKS)
    first = runner.execute(plan(0, [(0, 0, 32, 0)], new=[new_row(0, PROMPT, table, sampling=sampling)]))
    back = new_row(0, [*PROMPT, 5, 6], table, num_prompt=len(PROMPT), sampling=sampling, num_scored=20)
    again = runner.execute(plan(1, [(0, 16, 46, 1)], new=[back], freed=[0]))
    (before,), (after,) = first.prompt_scores, again.prompt_scores
    assert (before.first, after.first) == (1, 21)
    assert len(before.chosen) == 4 * 32
    assert len(after.chosen) == 4 * 39, "none of the outputs"
    assert before.chosen[4 * 20 :] == after.chosen[: 4 * 12]
    done = new_row(0, [*PROMPT, 5, 6], table, num_prompt=len(PROMPT), sampling=sampling, num_scored=59)
    assert runner.execute(plan(2, [(0, 48, 14, 1)], new=[done], freed=[0])).prompt_scores == ()


def test_greedy_rows_beside_it_keep_their_tokens(checkpoint: Path, expected: torch.Tensor, kernels: str) -> None:
    """They are found without logits; those that a neighbour's scores take come after."""
    alone = make_runner(checkpoint, kernels).execute(plan(0, [(0, 0, 20, 1)], new=[new_row(0, PROMPT[:20], range(8))]))
    scored = new_row(1, PROMPT, range(8, 16), sampling=spec(prompt_logprobs=2))
    both = make_runner(checkpoint, kernels).execute(
        plan(0, [(0, 0, 20, 1), (1, 0, 60, 1)], new=[new_row(0, PROMPT[:20], range(8)), scored])
    )
    assert both.token_ids[:4] == alone.token_ids
    (scores,) = both.prompt_scores
    assert isinstance(scores, PromptScores)
    assert scores.index == 1


@pytest.mark.parametrize(
    ("k", "num_scored", "start"),
    [(132, 0, 0), (-2, 0, 0), (1, -1, 0), (1, 60, 0), (1, 3, 16)],
)
def test_impossible_numbers_are_a_plan_error(
    checkpoint: Path, expected: torch.Tensor, k: int, num_scored: int, start: int
) -> None:
    runner = make_runner(checkpoint, "torch")
    row = new_row(0, PROMPT, range(BLOCKS), sampling=spec(prompt_logprobs=k), num_scored=num_scored)
    with pytest.raises(PlanError):
        runner.execute(plan(0, [(0, start, 10, 0)], new=[row]))
