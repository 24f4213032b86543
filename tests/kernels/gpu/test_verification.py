"""Which drafts are kept; and that what comes out has the same tokens, and the distribution, of the target alone."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_workers.noise import uniform
from kernels.gpu.verification import verify
from tests.chi_square import chi_square, chi_square_bound
from tests.kernels.gpu.device import DEVICE, poisoned

VOCAB = 5
TRIALS = 1000
LENGTH = 2  # tokens of an output
DRAFTS = 2


def verified(targets: list[list[int]], drafts: list[list[int]]) -> tuple[list[int], list[int]]:
    flat_targets, flat_drafts = (
        torch.tensor([token for of_one in of_all for token in of_one], dtype=torch.int32, device=DEVICE)
        for of_all in (targets, drafts)
    )
    counts = torch.tensor([len(of_one) for of_one in drafts], dtype=torch.int32, device=DEVICE)
    out = {name: poisoned(len(drafts), dtype=torch.int32) for name in ("accepted", "next_token")}
    accepted, next_token = verify(flat_targets, flat_drafts, counts, **out)
    assert accepted is out["accepted"]
    assert next_token is out["next_token"]
    return accepted.tolist(), next_token.tolist()


token_lists = st.lists(st.integers(0, 2), max_size=6) | st.lists(st.just(1), min_size=30, max_size=70)


@given(drafts=st.lists(token_lists, min_size=1, max_size=200), data=st.data())
@settings(max_examples=25)
def test_drafts_are_kept_while_they_are_the_tokens_of_the_target(drafts, data):
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    targets = []
    for of_one in drafts:
        tokens = [*of_one, int(random.integers(0, 3))]
        if random.random() < 0.6:
            tokens[random.integers(0, len(tokens))] = int(random.integers(-1, 3))
        targets.append(tokens)
    expected = []
    for target, draft in zip(targets, drafts, strict=True):
        kept = 0
        while kept < len(draft) and draft[kept] == target[kept]:
            kept += 1
        expected.append((kept, target[kept]))
    assert list(zip(*verified(targets, drafts), strict=True)) == expected


def random_chain(seed: int) -> NDArray[np.float64]:
    """[VOCAB, VOCAB]: of each token the running sums of the probabilities of the next one."""
    weights = np.exp(np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)))
    return weights.cumsum(-1) / weights.sum(-1, keepdims=True)


def next_tokens(chain: NDArray[np.float64], tokens: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """By inverse CDF, as many as tokens."""
    return (chain[tokens] <= u[:, None]).sum(-1)


def noise(trials: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """The trials' numbers for the output tokens with these indices."""
    return uniform(trials.astype(np.uint64), index)


def with_drafts(target: NDArray[np.float64], draft: NDArray[np.float64]) -> NDArray[np.int64]:
    """Outputs [TRIALS, LENGTH] after a token 0, each going on from what was verified, at its own pace.

    The draft model draws with the noise of the target.
    """
    trials = np.arange(TRIALS)
    outputs = [[0] for _ in trials]
    while min(len(output) for output in outputs) <= LENGTH:
        tokens = np.array([output[-1] for output in outputs])
        index = np.array([len(output) - 1 for output in outputs])
        drafts, targets = [], []
        for place in range(DRAFTS + 1):
            u = noise(trials, index + place)
            targets.append(next_tokens(target, tokens, u))
            tokens = next_tokens(draft, tokens, u)
            drafts.append(tokens)
        proposed = np.stack(drafts[:DRAFTS], 1).tolist()
        own = np.stack(targets, 1).tolist()
        for first in range(0, TRIALS, 100):
            some = slice(first, first + 100)
            results = verified(own[some], proposed[some])
            for output, of_one, kept, token in zip(outputs[some], proposed[some], *results, strict=True):
                output += [*of_one[:kept], token]
    return np.array([output[1 : LENGTH + 1] for output in outputs])


def test_outputs_are_those_of_the_target_alone_and_have_its_distribution():
    target, draft = random_chain(1), random_chain(2)
    found = with_drafts(target, draft)

    alone = [np.zeros(TRIALS, dtype=np.int64)]
    for index in range(LENGTH):
        alone.append(next_tokens(target, alone[-1], noise(np.arange(TRIALS), np.full(TRIALS, index))))
    assert np.array_equal(found, np.stack(alone[1:], 1))

    one_step = np.diff(target, prepend=0.0)
    joint = one_step[0][:, None] * one_step
    flat = (found * VOCAB ** np.arange(LENGTH)[::-1]).sum(-1)
    statistic, degrees = chi_square(flat, joint.flatten())
    assert degrees > 15
    assert statistic < chi_square_bound(degrees)
    of_draft = np.diff(draft, prepend=0.0)
    wrong = of_draft[0][:, None] * of_draft
    statistic, degrees = chi_square(flat, wrong.flatten())
    assert statistic > chi_square_bound(degrees)
