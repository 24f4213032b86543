"""What the drills compute from the times they noted; the servers are not started here."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tools.drills.itl import _longest_gap
from tools.drills.server import Reply
from tools.drills.slo import _is_good, read_trace

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_longest_gap_is_of_those_that_overlap_the_time_asked_for() -> None:
    times = [0.0, 5.0, 5.1, 5.3, 9.0]
    assert _longest_gap(times, 5.05, 5.2) == pytest.approx(0.2)
    assert _longest_gap(times, 4.9, 5.2) == 5.0, "it began before"
    assert _longest_gap(times, 5.2, 6.0) == pytest.approx(3.7), "it ended after"
    assert _longest_gap([1.0], 0.0, 9.0) == 0.0


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.1], "length"), True),
        (Reply(0.0, 200, [1, 2, 3], [1.2, 1.25, 1.3], "length"), False),
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.2], "length"), False),
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.1], "length", "cut off"), False),
        (Reply(0.0, 429), False),
    ],
)
def test_a_good_request_met_both_limits_and_finished(reply: Reply, good: bool) -> None:
    options = Namespace(slo_ttft_ms=1000.0, slo_tpot_ms=60.0)
    assert _is_good(0.0, reply, options) is good


def test_lengths_are_scaled_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 1500, "input_length": 320, "output_length": 64}\n'
        '{"timestamp": 2000, "input_length": 3, "output_length": 1}\n'
        '{"timestamp": 2500, "input_length": 9, "output_length": 9}\n'
    )
    rows = read_trace(str(file), 1 / 32, 2)
    assert [(row.at, len(row.prompt), row.max_tokens) for row in rows] == [(1.5, 10, 2), (2.0, 1, 1)]


def test_help_names_every_drill() -> None:
    command = [sys.executable, "-m", "tools.drills", "--help"]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert all(name in text for name in ("itl", "slo", "shortage", "soak"))
