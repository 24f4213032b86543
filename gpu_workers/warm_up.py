"""The first steps of a rank: they compile, allocate and load what all later steps use."""

from collections.abc import Callable, Iterable

from gpu_workers.runner import Runner
from ipc.codec import pack_floats, pack_ints
from ipc.engine_messages import NewRow, SamplingSpec, StepPlan

_GREEDY = SamplingSpec()
# All that a request can ask of the sampler, but a grammar, whose masks are applied as those of allowed ids are.
_EVERYTHING = SamplingSpec(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    bias_ids=pack_ints([1]),
    bias_values=pack_floats([1.0]),
    banned_ids=pack_ints([2]),
    min_tokens=4,
    allowed_ids=pack_ints([0, 1, 2]),
    logprobs=1,
)


def warm_up(
    make_runner: Callable[[int], Runner], tokens: int, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    """Prefill `tokens` of as many requests as that takes, and decode, in blocks that nobody has filled yet.

    Less where context or pool don't hold them. `make_runner` gives a runner of so many rows.
    """
    length = min(tokens, max_model_len - 1, num_blocks * block_size - 1)
    if length < 1:
        return
    blocks = length // block_size + 1
    count = min(tokens // length, num_blocks // blocks)
    steps = _Steps(make_runner(count), length, blocks)
    steps.run([(row, 0, length, 1) for row in range(count)], range(count))
    steps.run([(row, length, 1, 1) for row in range(count)])


def warm_up_kernels(
    make_runner: Callable[[int], Runner],
    tokens: int,
    max_seqs: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Steps of all kinds and sizes up to `tokens` and `max_seqs`, for kernels that are compiled when they first run.

    Products, attention and sampling may be computed in another way for each power of 2 of rows. Raises nothing where
    context or pool are too small for a step: it is left out.
    """
    length = min(tokens // 2, max_model_len - 1, num_blocks * block_size // 2 - 1)
    if length < 1:
        return
    blocks = length // block_size + 1
    steps = _Steps(make_runner(2), length, blocks)
    for sampling in (_GREEDY, _EVERYTHING):
        steps.run([(0, 0, length, 1), (1, 0, length, 1)], [0, 1], sampling)
        steps.run([(0, length, 1, 1), (1, length, 1, 1)])
    for size in _powers_of_2(length):
        steps.run([(0, 0, size, 0)], [0])
        if length > size:
            steps.run([(1, 0, length - size, 0)], [1])
            steps.run([(1, length - size, size, 0)])  # the same behind a long prefix
    if length > 2:
        steps.run([(0, 0, length - 1, 0)], [0])
        steps.run([(1, 0, length - 1, 0), (0, length - 1, 1, 1)], [1])  # a chunk beside a decode
    most = min(max_seqs, tokens, num_blocks)
    steps = _Steps(make_runner(most), 1, 1)
    for rows in _powers_of_2(most):
        for sampling in (_GREEDY, _EVERYTHING):
            steps.run([(row, 0, 1, 1) for row in range(rows)], range(rows), sampling)


def _powers_of_2(most: int) -> list[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class _Steps:
    """Plans for a runner; each row's request has `length` tokens, and `blocks` of the pool."""

    def __init__(self, runner: Runner, length: int, blocks: int) -> None:
        self._runner = runner
        self._length = length
        self._blocks = blocks
        self._step = 0
        self._used: set[int] = set()

    def run(
        self, scheduled: list[tuple[int, int, int, int]], new: Iterable[int] = (), sampling: SamplingSpec = _GREEDY
    ) -> None:
        """`scheduled` as in a plan; `new` rows have new requests."""
        rows = tuple(self._new(row, sampling) for row in new)
        freed = pack_ints(row for row in new if row in self._used)
        self._used.update(new)
        columns = pack_ints(value for row in scheduled for value in row)
        self._runner.execute(StepPlan(self._step, rows, freed, b"", columns))
        self._step += 1

    def _new(self, row: int, sampling: SamplingSpec) -> NewRow:
        table = range(row * self._blocks, (row + 1) * self._blocks)
        return NewRow(row, pack_ints([0] * self._length), self._length, pack_ints(table), sampling)
