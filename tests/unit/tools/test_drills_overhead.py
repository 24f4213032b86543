"""The overhead drill: which steps of an event log count, its sums, and the same work without a server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.runner import Step
from ipc.codec import unpack_ints
from ipc.engine_messages import StepPlan, StepResult
from scheduler_proc.event_log import Entry, PlanDigest
from scheduler_proc.events import StepDone, Tick
from tests.unit.gpu_workers.tiny import save_tiny
from tools.drills import in_process
from tools.drills.in_process import ClosedLoop
from tools.drills.overhead import StepTimes, decode_steps, row
from tools.score.model import load


def planned(step: int, rows: int, tokens: int) -> PlanDigest:
    return PlanDigest(step, rows, tokens, b"", b"", b"", b"", b"")


def done(step: int, sampled: int, *plans: PlanDigest) -> Entry:
    result = StepResult(
        step, b"\1\0\0\0" * sampled, between_us=step, prepare_us=10 + step, forward_us=100 + step, sample_us=1
    )
    return Entry(StepDone(0.0, result), plans)


def test_steps_count_that_decode_all_streams_right_after_such_a_step() -> None:
    log = [
        Entry(Tick(0.0), (planned(0, 3, 30), planned(1, 3, 3))),  # a step with prompts
        done(0, 3, planned(2, 3, 3)),
        done(1, 3, planned(3, 3, 3)),  # the first of its kind
        done(2, 3, planned(4, 2, 2)),
        done(3, 3, planned(5, 3, 3)),
        done(4, 2, planned(6, 3, 3)),  # fewer streams
        done(5, 3, planned(7, 3, 5)),
        done(6, 3, planned(8, 3, 3)),
        done(7, 3, planned(9, 3, 3)),  # the rest of a prompt beside decoding
        done(8, 3, planned(10, 3, 3)),
        done(9, 2),  # a chunk of one token that nothing is sampled after
        done(10, 3),
    ]
    assert [times.between for times in decode_steps(log, 3)] == [2, 3, 6]
    assert decode_steps(log, 3)[0] == StepTimes(2, 12, 102, 1)
    assert decode_steps(log, 2) == []


def test_the_table_has_medians_and_shares() -> None:
    steps = [StepTimes(10, 20, 60, 10), StepTimes(10, 20, 160, 10), StepTimes(40, 20, 330, 10)]
    assert [step.interval for step in steps] == [100, 200, 400]
    assert [step.outside for step in steps] == pytest.approx([0.4, 0.2, 0.175])
    # of sums: 1 - 550 / 700
    assert row(steps, 90.0, 120.0) == [
        *("3", "10", "20", "160", "10", "0.20", "20.0%", "21.4%"),
        "90.0",
        "120.0",
        "0.750",
    ]
    assert row([], 1.0, 2.0) == ["0", *["-"] * 7, "1.0", "2.0", "0.500"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)
    return path


class Recorder(in_process.Runner):
    """Notes the plans that it carries out (which it checks against its rows and blocks), and what they gave."""

    seen: list[tuple[StepPlan, list[int]]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen = []

    def collect(self, step: Step) -> StepResult | None:
        result = super().collect(step)
        assert result is not None
        self.seen.append((step.plan, list(unpack_ints(result.token_ids))))
        return result


def outputs(seen: list[tuple[StepPlan, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """(prompt, output) of each request in the order of their start."""
    requests: list[tuple[list[int], list[int]]] = []
    in_row: dict[int, list[int]] = {}
    for plan, tokens in seen:
        for new in plan.new_rows:
            requests.append((list(unpack_ints(new.token_ids)), []))
            in_row[new.row] = requests[-1][1]
        columns = list(unpack_ints(plan.scheduled))
        sampling = [line for line, sample in zip(columns[::4], columns[3::4], strict=True) if sample]
        for line, token in zip(sampling, tokens, strict=True):
            in_row[line].append(token)
    return requests


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    streams=st.integers(1, 4),
    output_tokens=st.integers(1, 9),
    step_tokens=st.integers(4, 48),
)
def test_every_prompt_is_served_whole_within_the_limits(
    model_dir: Path, lengths: list[int], streams: int, output_tokens: int, step_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "Runner", Recorder)
        loop = ClosedLoop(load(model_dir, "float32", 1, "torch"), streams, 49, step_tokens, 16)
    prompts = [[(7 * index + place) % 131 for place in range(length)] for index, length in enumerate(lengths)]
    assert loop.run(prompts, output_tokens) > 0
    runner = loop._runner
    assert isinstance(runner, Recorder)
    assert [prompt for prompt, _ in outputs(runner.seen)] == prompts
    assert all(len(output) == output_tokens for _, output in outputs(runner.seen))
    counts = [list(unpack_ints(plan.scheduled))[2::4] for plan, _ in runner.seen]
    assert max(map(sum, counts)) <= step_tokens
    assert max(map(len, counts)) <= streams
    # each token is computed once, but for the last of each output, which nobody needs
    assert sum(map(sum, counts)) == sum(lengths) + len(lengths) * (output_tokens - 1)


def test_outputs_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = save_tiny(tmp_path)
    monkeypatch.setattr(in_process, "Runner", Recorder)
    loop = ClosedLoop(load(tmp_path, "float32", 1), 2, 40, 16, 16)
    loop.run([[5, 17, 99], list(range(40, 65)), [3, 1]], 8)
    runner = loop._runner
    assert isinstance(runner, Recorder)
    for prompt, output in outputs(runner.seen):
        tokens = torch.tensor([prompt])
        expected = oracle.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output == expected[0, len(prompt) :].tolist()
