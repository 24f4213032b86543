"""The processes that simulate: what they answer is what a simulation here says, and they end with their pool."""

import json
import os
import signal
from pathlib import Path

import pytest

from config.schema import SchedulerConfig
from tests.unit.tools.test_tune_predicting import CALIBRATION
from tools.loadgen.slo import Slo
from tools.simulate.traces import read_trace
from tools.traces import scaled_rate
from tools.tune.predicting import predict
from tools.tune.simulating import Pool, PoolError, Source, Work
from tools.tune.space import Candidate

SLO = Slo(ttft=0.05, tpot=0.02)


def candidates() -> list[Candidate]:
    configs = [SchedulerConfig(max_seqs=seqs, max_step_tokens=64, prefill_chunk=64) for seqs in (1, 2, 4)]
    return [Candidate(config, 200, 0, 256) for config in configs]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    rows = [{"timestamp": 20 * index, "input_length": 30, "output_length": 8} for index in range(12)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Work(Source(str(path), limit=10, length_scale=0.5, rate_scale=2.0), CALIBRATION, SLO, find_rate=True)


def test_answers_are_those_of_a_simulation_here_and_in_order(work: Work) -> None:
    trace = scaled_rate(read_trace(Path(work.source.path), limit=10, length_scale=0.5), 2.0)
    assert trace[-1].time == pytest.approx(0.09)
    expected = [predict(trace, candidate, CALIBRATION, SLO, find_rate=True) for candidate in candidates()]
    assert expected[0] != expected[2]
    with Pool(work, 2) as pool:
        assert pool.predict(candidates()) == expected
        assert pool.predict([]) == []


def test_whose_a_request_was_is_not_predicted_since_the_load_generator_does_not_tell(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 16, "output_length": 4, "hash_ids": [0], "block_size": 16}
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps(row | {"tenant": "a", "priority": 3}) + "\n")
    assert [(request.tenant, request.priority) for request in read_trace(path)] == [("a", 3)]
    assert [(request.tenant, request.priority) for request in Source(str(path)).read()] == [("", 0)]


def test_outputs_of_a_recording_are_not_in_the_cache_since_the_load_generator_cannot_bring_them_there(
    tmp_path: Path,
) -> None:
    """The second turn repeats the prompt of the first, two full blocks, its output, two blocks, and says some more."""
    rows = [
        {"input_length": 16, "output_length": 20, "hash_ids": [0, 1], "output_hash_ids": [2, 3]},
        {"input_length": 40, "output_length": 4, "hash_ids": [0, 1, 2, 3, 4]},
    ]
    path = tmp_path / "recording.jsonl"
    path.write_text(
        "".join(json.dumps({"timestamp": 1000 * at, "block_size": 8, **row}) + "\n" for at, row in enumerate(rows))
    )
    config = SchedulerConfig(max_seqs=4, max_step_tokens=64, prefill_chunk=64, block_size=8)
    candidate = Candidate(config, 200, 0, 256)
    trace = Source(str(path)).read()
    assert not any(request.outputs for request in trace)
    found = predict(trace, candidate, CALIBRATION, SLO, find_rate=False)
    assert found.hit_rate == pytest.approx(16 / 56)
    as_it_was = predict(read_trace(path), candidate, CALIBRATION, SLO, find_rate=False)
    assert as_it_was.hit_rate == pytest.approx(32 / 56)


def test_a_process_that_dies_is_told(work: Work) -> None:
    with Pool(work, 1) as pool:
        pool.predict(candidates()[:1])
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        with pytest.raises(PoolError, match="ended with status -9"):
            pool.predict(candidates())


def test_the_pool_leaves_no_process(work: Work) -> None:
    with pytest.raises(KeyboardInterrupt), Pool(work, 2) as pool:
        raise KeyboardInterrupt
    assert all(process.returncode is not None for process in pool.processes)
