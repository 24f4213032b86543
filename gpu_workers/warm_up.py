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
    make_runner: Callable[[int], Runner],
    tokens: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    thorough: bool,
) -> None:
    """Prefill `tokens` of as many requests as that takes, and decode, in blocks that nobody has filled yet.

    Less where context or pool don't hold them. `make_runner` gives a runner of so many rows. `thorough`: of two
    requests at least, with everything that sampling can be asked for, chunks of all sizes, and one beside a decode.
    """
    length = min(tokens // 2 if thorough else tokens, max_model_len - 1, num_blocks * block_size - 1)
    if length < 1:
        return
    blocks = length // block_size + 1
    count = min(tokens // length, num_blocks // blocks)
    runner = make_runner(count)
    step = 0

    def run(
        scheduled: list[tuple[int, int, int, int]], new: Iterable[int] = (), sampling: SamplingSpec = _GREEDY
    ) -> None:
        nonlocal step
        rows = tuple(
            NewRow(row, pack_ints([0] * length), length, pack_ints(range(row * blocks, (row + 1) * blocks)), sampling)
            for row in new
        )
        freed = pack_ints(row for row in new if step)
        runner.execute(StepPlan(step, rows, freed, b"", pack_ints(value for row in scheduled for value in row)))
        step += 1

    for sampling in (_GREEDY, _EVERYTHING) if thorough else (_GREEDY,):
        run([(row, 0, length, 1) for row in range(count)], range(count), sampling)
        run([(row, length, 1, 1) for row in range(count)])
    if not thorough:
        return
    # Products may be computed in another way for each power of 2 of rows.
    rows = 1
    while rows <= length:
        run([(0, 0, rows, 0)], [0])
        rows *= 2
    if count > 1 and length > 2:
        run([(0, 0, length - 1, 0)], [0])
        run([(1, 0, length - 1, 0), (0, length - 1, 1, 1)], [1])
