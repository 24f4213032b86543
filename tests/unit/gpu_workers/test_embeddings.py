"""Embeddings from the runner against hidden states of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_workers.comm import LocalComm
from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner
from ipc.codec import pack_ints, unpack_floats
from ipc.engine_messages import NewRow, StepResult
from ipc.messages import Pooling
from tests.unit.gpu_workers.plans import plan, spec
from tests.unit.gpu_workers.test_llama import VARIANTS, tokens_of
from tests.unit.gpu_workers.tiny import BLOCK_SIZE, load_tiny, save_tiny

PROMPTS = [tokens_of(seed, 20 + 30 * seed) for seed in range(3)]


def new(row: int, prompt: list[int], pooling: Pooling = "last") -> NewRow:
    blocks = range(8 * row, 8 * row + 8)
    return NewRow(row, pack_ints(prompt), len(prompt), pack_ints(blocks), spec(), pooling=pooling)


def vectors(result: StepResult | None) -> list[NDArray[np.float64]]:
    assert result is not None
    return [np.array(unpack_floats(part), dtype=np.float64) for part in result.embeddings]


def runner_of(path: Path, kernels: str) -> Runner:
    model = load_tiny(path, kernels=kernels)
    return Runner(model, model.allocate_kv(24, BLOCK_SIZE), 24, BLOCK_SIZE, 3, 120, LocalComm())


def pooled(states: NDArray[np.float64], pooling: str) -> NDArray[np.float64]:
    vector = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("variant", ["gqa3", "tied", "odd_width", "qwen2"])
def test_embeddings_are_made_of_the_hidden_states_of_transformers(variant: str, kernels: str, tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, **VARIANTS[variant])
    poolings: list[Pooling] = ["last", "mean", "cls"]
    for turn in range(3):  # each prompt with each pooling, and all three in one step
        runner = runner_of(tmp_path, kernels)
        kinds = [poolings[(row + turn) % 3] for row in range(3)]
        scheduled = [(row, 0, len(prompt), 1) for row, prompt in enumerate(PROMPTS)]
        rows = [new(row, prompt, kinds[row]) for row, prompt in enumerate(PROMPTS)]
        found = vectors(runner.execute(plan(0, scheduled, new=rows)))
        for vector, prompt, kind in zip(found, PROMPTS, kinds, strict=True):
            with torch.no_grad():
                states = oracle.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
            np.testing.assert_allclose(vector, pooled(states, kind), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_bits_are_the_same_in_chunks_and_beside_other_rows(pooling: Pooling, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prompt = PROMPTS[2]
    runner = runner_of(tmp_path, kernels)
    alone = runner.execute(plan(0, [(0, 0, len(prompt), 1)], new=[new(0, prompt, pooling)]))
    runner = runner_of(tmp_path, kernels)
    first = runner.execute(
        plan(0, [(1, 0, 33, 0), (0, 0, 20, 1)], new=[new(1, prompt, pooling), new(0, PROMPTS[0], "")])
    )
    assert first is not None
    assert first.embeddings == ()
    runner.execute(plan(1, [(0, 20, 1, 1), (1, 33, 1, 0)]))
    # Beside a row that draws, for which logits are needed, and greedy ones, for which they are not kept.
    mixed = runner.execute(plan(2, [(0, 21, 1, 1), (1, 34, len(prompt) - 34, 1)]))
    assert alone is not None
    assert mixed is not None
    assert mixed.embeddings == (b"", alone.embeddings[0])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_row_that_lost_its_blocks_begins_anew(pooling: Pooling, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prompt = PROMPTS[1]
    alone = runner_of(tmp_path, kernels).execute(plan(0, [(0, 0, len(prompt), 1)], new=[new(0, prompt, pooling)]))
    runner = runner_of(tmp_path, kernels)
    runner.execute(plan(0, [(2, 0, 30, 0)], new=[new(2, prompt, pooling)]))
    again = runner.execute(plan(1, [(1, 0, len(prompt), 1)], new=[new(1, prompt, pooling)], freed=[2]))
    assert alone is not None
    assert again is not None
    assert again.embeddings == alone.embeddings


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_plan_that_skips_positions_of_a_pooled_prompt_is_refused(
    pooling: Pooling, kernels: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    with pytest.raises(PlanError, match="row 0: hidden states before position 16 were not computed"):
        runner_of(tmp_path, kernels).execute(plan(0, [(0, 16, 4, 1)], new=[new(0, PROMPTS[0], pooling)]))


def test_an_embedding_beside_a_row_that_draws(kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    prompt = PROMPTS[1]
    expected = runner_of(tmp_path, kernels).execute(plan(0, [(0, 0, len(prompt), 1)], new=[new(0, prompt)]))
    drawn = NewRow(1, pack_ints([5, 6]), 2, pack_ints([9]), spec(temperature=1.0, seed=3))
    scheduled = [(1, 0, 2, 1), (0, 0, len(prompt), 1)]
    mixed = runner_of(tmp_path, kernels).execute(plan(0, scheduled, new=[new(0, prompt), drawn]))
    assert expected is not None
    assert mixed is not None
    assert mixed.embeddings == (b"", expected.embeddings[0])


def test_a_row_that_is_used_again_gives_tokens_only(kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    runner = runner_of(tmp_path, kernels)
    runner.execute(plan(0, [(0, 0, 20, 1)], new=[new(0, PROMPTS[0])]))
    again = runner.execute(plan(1, [(0, 0, 20, 1)], new=[new(0, PROMPTS[0], "")], freed=[0]))
    assert again is not None
    assert again.embeddings == ()
