"""Greedy decoding as a rank does it: sequences together, in CUDA graphs, each step launched behind the last one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from config.graphs import graph_buckets
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner, Step
from ipc.codec import pack_ints, unpack_ints
from ipc.engine_messages import NewRow, SamplingSpec, StepPlan

_BLOCK_SIZE = 16


def decode(model: LlamaModel, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """For each row of a reference as many tokens as its output has, after its prompt."""
    longest = max(len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows)
    blocks = -(-longest // _BLOCK_SIZE)
    count = len(rows)
    kv = model.allocate_kv(count * blocks, _BLOCK_SIZE)
    runner = Runner(model, kv, count * blocks, _BLOCK_SIZE, count, longest, LocalComm())
    runner.capture(graph_buckets(count), lambda done: None)
    found: list[list[int]] = [[] for _ in rows]
    running: tuple[Step, list[int]] | None = None

    def collect(step: Step, sampled: list[int]) -> None:
        result = runner.collect(step)
        assert result is not None
        for row, token in zip(sampled, unpack_ints(result.token_ids), strict=True):
            found[row].append(token)

    for number, (new, scheduled) in enumerate(_steps(rows, blocks)):
        columns = pack_ints(value for entry in scheduled for value in entry)
        step = runner.launch(StepPlan(number, new, b"", b"", columns))
        if running is not None:
            collect(*running)
        runner.sample(step)
        running = step, [row for row, *_ in scheduled]
        if not runner.overlaps:
            collect(*running)
            running = None
    if running is not None:
        collect(*running)
    return found


def _steps(
    rows: Sequence[Mapping[str, Any]], blocks: int
) -> Iterator[tuple[tuple[NewRow, ...], list[tuple[int, int, int, int]]]]:
    """(new rows, scheduled): the prompts one by one, then a token of each row that has one left."""
    for index, row in enumerate(rows):
        prompt = row["prompt_ids"]
        table = pack_ints(range(index * blocks, (index + 1) * blocks))
        new = NewRow(index, pack_ints(prompt), len(prompt), table, SamplingSpec())
        yield (new,), [(index, 0, len(prompt), 1)]
    for done in range(1, max(len(row["output_ids"]) for row in rows)):
        yield (
            (),
            [
                (index, len(row["prompt_ids"]) + done - 1, 1, 1)
                for index, row in enumerate(rows)
                if len(row["output_ids"]) > done
            ],
        )


def mismatch(row: Mapping[str, Any], tokens: Sequence[int], tolerance: float) -> str:
    """Where `tokens` first differ from the row's output, if its margin there is above the tolerance; or "".

    What comes behind a difference follows from another text.
    """
    steps = zip(row["output_ids"], tokens, row["margins"], strict=True)
    for step, (expected, actual, margin) in enumerate(steps):
        if actual != expected:
            text = f"{row['id']} decoded step {step}: {actual} for {expected}, margin {margin:.3f}"
            return text if margin > tolerance else ""
    return ""
