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


_SCORED = SamplingSpec(prompt_logprobs=1)


class WarmUp:
    """Steps of requests that nobody has sent.

    `make_runner` gives a runner of so many rows, of requests of up to `max_model_len` tokens, over a pool of
    `num_blocks` blocks of `block_size` tokens. What the blocks hold does not matter: requests may start behind
    positions that were not computed, and share blocks where there are too few.
    """

    def __init__(
        self,
        make_runner: Callable[[int], Runner],
        *,
        max_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._make_runner = make_runner
        self._max_seqs = max_seqs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._longest = min(max_model_len, num_blocks * block_size) - 1  # so that one token more can be decoded

    def largest_step(self, tokens: int) -> None:
        """Prefill `tokens` of as many requests as that takes, and decode; less where no request may be so long."""
        length = min(tokens, self._longest)
        if length < 1:
            return
        count = min(tokens // length, self._max_seqs)
        steps = self._steps(count, length)
        steps.run([(row, 0, length, 1) for row in range(count)], range(count))
        steps.run([(row, length, 1, 1) for row in range(count)])

    def compile_kernels(self, tokens: int) -> None:
        """Steps of all kinds and sizes up to `tokens`, for kernels that are compiled when they first run.

        Products, attention and sampling may be computed in another way for each power of 2 of rows, and attention also
        for long contexts. What graphs are captured for later is among these steps, and what there is no graph for.
        """
        longest = self._longest
        if longest < 1:
            return
        steps = self._steps(2, longest)
        half = min(max(tokens // 2, 1), longest)
        for sampling in (_GREEDY, _EVERYTHING):
            steps.run([(row, longest - half, half, 1) for row in (0, 1)], [0, 1], sampling)
            steps.run([(row, longest, 1, 1) for row in (0, 1)])
        for count in _powers_of_2(min(tokens, longest)):
            steps.run([(0, 0, count, 0)], [0], _SCORED)
            steps.run([(1, longest - count, count, 0)], [1])
        steps.run([(1, longest - half, half, 0), (0, longest - 1, 1, 1)], [0, 1])  # a chunk beside a decode
        most = min(self._max_seqs, tokens)
        steps = self._steps(most, 1)
        for rows in _powers_of_2(most):
            for sampling in (_GREEDY, _EVERYTHING):
                steps.run([(row, 0, 1, 1) for row in range(rows)], range(rows), sampling)

    def _steps(self, rows: int, length: int) -> "_Steps":
        return _Steps(self._make_runner(rows), length, length // self._block_size + 1, self._num_blocks)


def _powers_of_2(most: int) -> list[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class _Steps:
    """Plans for a runner; each row's request has `length` tokens, and `blocks` of the pool's `num_blocks`."""

    def __init__(self, runner: Runner, length: int, blocks: int, num_blocks: int) -> None:
        self._runner = runner
        self._length = length
        self._blocks = blocks
        self._num_blocks = num_blocks
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
        table = (block % self._num_blocks for block in range(row * self._blocks, (row + 1) * self._blocks))
        return NewRow(row, pack_ints([0] * self._length), self._length, pack_ints(table), sampling)
