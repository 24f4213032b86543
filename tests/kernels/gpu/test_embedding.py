"""Rows of an embedding table, and the ids of tokens that are known on the device only."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.embedding import embed, input_ids
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.rows import ROUNDING, apart, bits, normal


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 30),
    ids=st.lists(st.integers(-1, 40), min_size=1, max_size=8),
    rows=st.integers(1, 20),
    first=st.sampled_from([0, 1, 16, 30]),
    width=st.integers(1, 300),
    dtype=st.sampled_from(list(ROUNDING)),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    several_blocks=st.booleans(),
)
def test_rows_of_a_part_of_the_vocabulary(
    seed: int,
    ids: list[int],
    rows: int,
    first: int,
    width: int,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    several_blocks: bool,
) -> None:
    table, token_ids = apart(normal(seed, rows, width, dtype=dtype), 3), torch.tensor(ids, dtype=id_dtype).to(DEVICE)
    out = apart(poisoned(len(ids), width, dtype=dtype), 4)
    if several_blocks:
        with trying({"BLOCK": 64, "num_warps": 1}):
            assert embed(table, token_ids, first=first, out=out) is out
    else:
        assert embed(table, token_ids, first=first, out=out) is out
    for token_id, state in zip(ids, out, strict=True):
        row = token_id - first
        assert torch.equal(state, table[row] if 0 <= row < rows else torch.zeros_like(state))
    assert torch.equal(bits(embed(table, token_ids, first=first)), bits(out))


@settings(max_examples=15)
@given(tokens=st.integers(1, 600), sequences=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_tokens_sampled_in_the_previous_step_are_filled_in(tokens: int, sequences: int, seed: int) -> None:
    """Rows of tokens that are known may be anything."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.randint(0, 1000, (tokens,), generator=generator)
    sampled = torch.rand(tokens, generator=generator) < 0.5
    rows = torch.randint(0, sequences, (tokens,), generator=generator)
    last_tokens = torch.randint(0, 1000, (sequences,), generator=generator)
    expected = torch.where(sampled, last_tokens[rows], known)
    out = poisoned(tokens, dtype=torch.int32)
    given_ids, given_rows = known.masked_fill(sampled, -1), rows.masked_fill(~sampled, 1 << 30)
    returned = input_ids(*(x.to(DEVICE, torch.int32) for x in (given_ids, given_rows, last_tokens)), out)
    assert returned is out
    assert torch.equal(out.cpu(), expected.int())
