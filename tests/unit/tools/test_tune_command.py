"""The tuner's command line: what is wrong is said in a line, before anything starts."""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.unit.tools.test_tune_predicting import CALIBRATION, latencies
from tools.simulate.simulator import SimulationError
from tools.tune.__main__ import main
from tools.tune.calibrating import CalibrationError
from tools.tune.confirming import Measurement
from tools.tune.options import build_parser
from tools.tune.predicting import Calibration, Prediction
from tools.tune.trials import Trial
from tools.tune.tuning import Tuning

ROWS = [{"timestamp": 100 * index, "input_length": 20 + index, "output_length": 4} for index in range(6)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that it says."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(list(argv)))  # argparse ends the program itself
    assert ended.value.code in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo", "ttft=1"], "must be limits such as"),
        (["--slo", "ttft=1s", "--settings", "max_seqs,block_size"], "'block_size' is none of max_seqs"),
        (["--slo", "ttft=1s", "--budget", "0"], "at least 1"),
        (["--slo", "ttft=1s", "--grid", "max-seqs=0"], "argument --grid: --max-seqs: must be a whole number from 1 to"),
        ([], "--slo"),
    ],
)
def test_options(capsys: pytest.CaptureFixture[str], trace: Path, flags: list[str], message: str) -> None:
    assert message in refused(capsys, "--trace", str(trace), *flags, "--", "--model", "none")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ([], "--model is missing"),
        (["--model", "none", "--max-seq=3"], "unknown argument --max-seq; did you mean --max-seqs?"),
        (["--model", "none", "--frontends", "0"], "--frontends 0"),
        (["--model", "none", "--plan"], "--plan"),
        (["--model", "no/such/model.gguf"], "no/such/model.gguf"),
    ],
)
def test_flags_of_the_server(capsys: pytest.CaptureFixture[str], trace: Path, server: list[str], message: str) -> None:
    assert message in refused(capsys, "--trace", str(trace), "--slo", "ttft=1s", "--", *server)


def test_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_path: Path) -> None:
    def tune(path: Path) -> str:
        return refused(capsys, "--trace", str(path), "--slo", "ttft=1s", "--", "--model", str(model_path))

    assert "none.jsonl" in tune(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(ROWS[0]) + "\n" + '{"timestamp": 1, "input_length": 0, "output_length": 3}\n')
    assert "line 2" in tune(broken)
    at_once = tmp_path / "once.jsonl"
    at_once.write_text((json.dumps(ROWS[0]) + "\n") * 3)
    assert "come at one moment" in tune(at_once)
    events = tmp_path / "events.log"
    events.write_bytes(b"tmevents" + bytes(40))
    assert "an event log cannot be sent to a server again" in tune(events)


def test_outputs_and_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path, model_path: Path
) -> None:
    start = ["--trace", str(trace), "--slo", "ttft=1s"]
    model = ["--", "--model", str(model_path)]
    assert "--json" in refused(capsys, *start, "--json", str(tmp_path / "no" / "x.json"), *model)
    only = refused(capsys, *start, "--settings", "max-seqs", *model, "--max-seqs", "4")
    assert "no setting is left" in only
    default = refused(capsys, *start, "--settings", "prefer", *model, "--prefer", "mixed")
    assert "no setting is left" in default
    assert "--best 27: at most 26" in refused(capsys, *start, "--best", "27", *model)
    twice = refused(capsys, *start, "--grid", "max-seqs=8", *model, "--max-seqs", "4")
    assert "--grid: --max-seqs=8: the flags after -- say something of it already" in twice
    bad = tmp_path / "calibration.json"
    bad.write_text("{}")
    assert "calibration.json" in refused(capsys, *start, "--calibration", str(bad), *model)


def test_what_is_wrong_comes_before_what_takes_long(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    main(["--trace", str(trace), "--slo", "ttft=1s", "--", "--model", "none", "--prefer", "none"])
    assert "calibration" not in capsys.readouterr().err


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags with which nothing is started: calibration finds at once what it is to find, and keeps it."""

    async def calibrate(*_: object, **__: object) -> Calibration:
        return CALIBRATION

    monkeypatch.setattr("tools.tune.tuning.calibrate", calibrate)
    return ["--calibration", str(tmp_path / "costs.json"), "--no-confirm", "--processes", "1"]


def test_from_costs_to_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path, model_path: Path, calibrated: list[str]
) -> None:
    """Every step takes 10 ms, whatever is in it: nothing makes the six requests any faster, so nothing is changed."""
    report = tmp_path / "report.json"
    flags = ["--trace", str(trace), "--slo", "ttft=1s,tpot=60ms", "--budget", "15", "--json", str(report)]
    assert main([*flags, *calibrated, "--", "--model", str(model_path), "--kv-memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    assert "chosen: no flags beyond yours" in out
    assert "6 requests are few" in out
    found = json.loads(report.read_text())
    assert found["flags"] == []
    assert found["arms"][0]["predicted"]["figures"]["itl"]["p50"] == pytest.approx(0.01)
    assert found["arms"][0]["measured"] is None


def test_a_grid_is_listed_beside_the_choice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path, model_path: Path, calibrated: list[str]
) -> None:
    """One request at a time makes the later wait for 4 steps each. What the defaults take anyway is the defaults."""
    report = tmp_path / "report.json"
    flags = ["--trace", str(trace), "--slo", "ttft=40ms", "--rate-scale", "10", "--budget", "4", "--json", str(report)]
    grid = ["--settings", "prefer", "--grid", "max-seqs=1,64 max-step-tokens=32,512"]
    assert main([*flags, *grid, *calibrated, "--", "--model", str(model_path), "--kv-memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    assert "left out, since the server would refuse it: --max-seqs=64 --max-step-tokens=32: " in out
    assert "time foreseen" in out
    found = json.loads(report.read_text())
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert arms["defaults"]["in_grid"]
    assert [arm["flags"] for arm in arms.values() if not arm["searched"]] == [
        ["--max-seqs=1", "--max-step-tokens=32"],
        ["--max-seqs=1", "--max-step-tokens=512"],
    ]
    assert arms["G1"]["predicted"]["figures"]["share"] < arms["defaults"]["predicted"]["figures"]["share"]
    assert found["grid"]["ratio"] == 1.0
    assert "1.000 of the goodput, predicted" in out
    assert "G2: --max-seqs=1 --max-step-tokens=512" in out


@pytest.mark.parametrize(("limit", "expected"), [("5ms", "no rate is so low"), ("50ms", "highest rate, predicted")])
def test_the_highest_rate(
    capsys: pytest.CaptureFixture[str], trace: Path, model_path: Path, calibrated: list[str], limit: str, expected: str
) -> None:
    flags = ["--trace", str(trace), "--slo", f"ttft={limit}", "--find-rate", "--budget", "4", "--settings", "prefer"]
    assert main([*flags, *calibrated, "--", "--model", str(model_path), "--kv-memory", "64MiB"]) == 0
    assert expected in capsys.readouterr().out


def kept(flags: Sequence[str]) -> Path:
    """Where `--calibration` is."""
    return Path(flags[flags.index("--calibration") + 1])


@pytest.fixture
def tune(trace: Path, model_path: Path, calibrated: list[str]) -> Callable[..., int]:
    """Simulates a little, with further flags of the server; the first time it calibrates."""

    def run(*server: str) -> int:
        start = ["--trace", str(trace), "--slo", "ttft=1s", "--budget", "2", "--settings", "prefer", *calibrated]
        return main([*start, "--", "--model", str(model_path), "--kv-memory", "64MiB", *server])

    return run


def test_a_calibration_is_used_again_whatever_the_scheduler_is_told(
    tune: Callable[..., int], calibrated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune("--threads", "1") == 0
    before = kept(calibrated).read_bytes()
    monkeypatch.delattr("tools.tune.tuning.calibrate")
    assert tune("--threads", "1", "--max-seqs", "8", "--no-prefix-cache") == 0
    assert kept(calibrated).read_bytes() == before


def test_a_calibration_of_other_flags_is_refused(
    tune: Callable[..., int], calibrated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--threads", "1") == 0
    before = kept(calibrated).read_bytes()
    capsys.readouterr()
    assert tune("--threads", "2") == 2
    error = capsys.readouterr().err
    assert "error: --calibration " in error
    assert "measured with --threads 1, here 2: delete it to have it measured anew" in error
    assert kept(calibrated).read_bytes() == before


def test_a_calibration_that_does_not_say_of_what_is_refused(
    tune: Callable[..., int], calibrated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions wrote them."""
    kept(calibrated).write_bytes(msgspec.json.encode(CALIBRATION))
    assert tune() == 2
    assert "no calibration of this version: Object missing required field `subject`" in capsys.readouterr().err


@pytest.mark.parametrize("stuck", [False, True], ids=["unfitted", "stuck"])
def test_what_was_measured_is_not_lost_when_its_costs_cannot_be_fitted(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
    model_path: Path,
    calibrated: list[str],
    stuck: bool,
) -> None:
    """Of the first arm they cannot; `stuck`: what the others' costs lead to cannot be simulated either."""
    numbers = itertools.count()

    def fitted(_: object) -> Calibration:
        if not next(numbers):
            raise CalibrationError("the log has 3 measured steps; at least 10 are needed")
        return CALIBRATION

    def confirm(_: Tuning, trials: Sequence[Trial]) -> tuple[list[Measurement], bool]:
        found = [Measurement([latencies(0.1 + 0.1 * number, [])] * 6, 6) for number, _ in enumerate(trials)]
        return found, False

    def predict(*_: object, **__: object) -> Prediction:
        raise SimulationError("the scheduler gets stuck")

    monkeypatch.setattr("tools.tune.__main__.fitted", fitted)
    monkeypatch.setattr(Tuning, "confirm", confirm)
    if stuck:
        monkeypatch.setattr("tools.tune.tuning.predict", predict)
    report = tmp_path / "report.json"
    flags = ["--trace", str(trace), "--slo", "ttft=1s", "--budget", "3", "--settings", "prefer", "--json", str(report)]
    grid = ["--grid", "max-seqs=1,2", *calibrated, "--confirm"]
    assert main([*flags, *grid, "--", "--model", str(model_path), "--kv-memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    reason = "the log has 3 measured steps; at least 10 are needed"
    assert f"defaults: what its steps cost cannot be told from its own runs: {reason}" in out
    assert "chosen: no flags beyond yours" in out
    default, *others = json.loads(report.read_text())["arms"]
    assert others
    assert [arm["measured"]["met"] for arm in (default, *others)] == [6] * (1 + len(others))
    assert default["unfitted"] == reason
    assert default["afterwards"] is None
    assert all(arm["unfitted"] == "" and (arm["afterwards"] is None) == stuck for arm in others)


@pytest.mark.parametrize(
    ("broken", "status", "text"),
    [
        (KeyboardInterrupt, 130, "INCOMPLETE: interrupted after 1 of 3 runs; the choice is of what is predicted"),
        (None, 1, "INCOMPLETE: 2 of 3 runs could not be made; the choice is of what is predicted"),
    ],
    ids=["interrupted", "lost"],
)
def test_what_was_measured_before_a_confirmation_ends_early_is_reported(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
    model_path: Path,
    calibrated: list[str],
    broken: type[BaseException] | None,
    status: int,
    text: str,
) -> None:
    """Only the first combination of the grid was: nothing is said of the choice but what was predicted."""

    async def confirm(
        _: str, arms: Sequence[Sequence[str]], __: object, found: Sequence[Measurement], **___: object
    ) -> None:
        [measured] = [number for number, arm in enumerate(arms) if "--max-seqs=1" in arm]
        found[measured].answered += [latencies(0.1, [])] * 6
        found[measured].requests += 6
        found[measured].servers.append((None, []))  # type: ignore[arg-type]
        if broken:
            raise broken
        for number, measurement in enumerate(found):
            if number != measured:
                measurement.lost.append("the server did not start")

    monkeypatch.setattr("tools.tune.tuning.confirm", confirm)
    monkeypatch.setattr("tools.tune.__main__.fitted", lambda _: CALIBRATION)
    monkeypatch.setattr(Measurement, "slowdown", lambda *_: 1.0)
    report = tmp_path / "report.json"
    flags = ["--trace", str(trace), "--slo", "ttft=1s", "--budget", "1", "--settings", "prefer", "--json", str(report)]
    grid = ["--grid", "max-seqs=1,2", *calibrated, "--confirm"]
    assert main([*flags, *grid, "--", "--model", str(model_path), "--kv-memory", "64MiB"]) == status
    out = capsys.readouterr().out
    assert text in out
    assert ("defaults: a run could not be made: the server did not start" in out) == (broken is None)
    assert "chosen: no flags beyond yours" in out
    assert "choice / best found" not in out  # one was measured, the other only predicted
    assert "largest error" in out  # the table of the grid is there all the same
    found = json.loads(report.read_text())
    assert len(found["incomplete"]) == 1
    measured = {" ".join(arm["flags"]): arm["measured"] for arm in found["arms"]}
    assert measured.pop("--max-seqs=1")["met"] == 6
    assert list(measured.values()) == [None, None]


def test_the_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for word in ("calibrates", "searches", "confirms", "--find-rate", "Exit status", "max_itl_ms"):
        assert word in text
