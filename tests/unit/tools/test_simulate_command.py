"""`python -m tools.simulate` as a user meets it: tables, files, errors."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.reports.charts import log_ticks, nice_ticks
from tools.simulate.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[3]
FAST = ["--cost", "5000,300,250,0.05,0.01"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """120 requests, every third of which begins like the others that do."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for index in range(120):
            ids = [1, 2, 1000 + index] if index % 3 == 0 else [3 * index + 5000, 3 * index + 5001, 3 * index + 5002]
            row = {
                "timestamp": 40 * index,
                "input_length": 70,
                "output_length": 5 + index % 7,
                "hash_ids": ids,
                "block_size": 32,
            }
            file.write(json.dumps(row) + "\n")
    return path


def values(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(name + "  "))
    return re.split(r"\s{2,}", line.removeprefix(name).strip())


def test_a_run_prints_a_table_and_writes_files(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "all.json")]
    assert main(["--trace", str(trace), *FAST, *files, "--max-seqs", "8", "--kv-tokens", "2000"]) == 0
    out = capsys.readouterr().out
    assert values(out, "finished / refused / failed") == ["120 / 0 / 0"]
    assert values(out, "KV blocks") == ["125"]
    assert values(out, "TTFT p99")[0].endswith("s")
    (run,) = json.loads((tmp_path / "all.json").read_text())["runs"]
    # 40 of the prompts share 64 of their 70 tokens: all but the first can hit, an eviction apart.
    assert run["infinite_hit_rate"] == pytest.approx(39 * 64 / (120 * 70))
    assert 0 < run["hit_rate"] <= run["infinite_hit_rate"]
    assert run["latencies"]["itl"]["n"] == run["latencies"]["output_tokens"] - 120
    assert run["decisions"] >= run["steps"] > 0


def test_batchings_and_values_are_compared_side_by_side(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(trace), *FAST, "--batching", "static,continuous"]) == 0
    out = capsys.readouterr().out
    assert len(values(out, "goodput (TTFT 1.00 s, TPOT 60.0 ms)")) == 2
    assert "static  continuous" in re.sub(r" {2,}", "  ", out)
    assert main(["--trace", str(trace), *FAST, "--sweep", "prefix-cache=true,false"]) == 0
    rates = values(capsys.readouterr().out, "prompt tokens from the cache")
    assert float(rates[0].rstrip("%")) > 10
    assert rates[1] == "0.00%"
    assert main(["--trace", str(trace), *FAST, "--sweep", "kv_blocks=60,6000", "--limit", "9"]) == 0
    assert values(capsys.readouterr().out, "KV blocks") == ["60", "6,000"]


def test_slo_and_longer_rows(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(trace), *FAST, "--max-model-len", "78", "--slo-ttft-ms", "0.001"]) == 0
    out = capsys.readouterr().out
    longer = sum(70 + 5 + index % 7 > 78 for index in range(120))
    assert f"{longer} requests are longer than --max-model-len 78 and are refused" in out
    assert values(out, "finished / refused / failed") == [f"{120 - longer} / {longer} / 0"]
    assert values(out, "requests within the SLO") == ["0 (0.0%)"]


def test_a_recorded_run_replays_in_any_process(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the seed of Python's string hashes: nothing may depend on the order of sets."""
    log = tmp_path / "events.log"
    sizes = ["--rate-scale", "10", "--block-size", "2", "--kv-tokens", "300", "--host-blocks", "60"]
    flags = [*sizes, "--kv-shortage", "swap", "--policy", "fair", "--max-itl-ms", "30"]
    assert main(["--trace", str(trace), *FAST, *flags, "--event-log", str(log)]) == 0
    simulated = capsys.readouterr().out
    assert int(values(simulated, "preemptions")[0]) > 0
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tools.simulate", "--replay", str(log)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        steps = values(simulated, "steps")[0]
        assert f"{steps} of {steps} plans are the same" in done.stdout
        for name in ("TTFT p99", "TPOT p50", "queue time p90", "E2E p99"):
            assert values(done.stdout, name) == values(simulated, name)


def test_a_recorded_run_is_a_trace_and_a_source_of_costs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.log"
    assert main(["--trace", str(trace), "--cost", "5000,300,250,5,1", "--event-log", str(log)]) == 0
    first = capsys.readouterr().out
    assert main(["--trace", str(log), "--cost", f"fit:{log}"]) == 0
    second = capsys.readouterr().out
    fitted = re.search(r"microseconds: ([\d.,e+-]+) \(fitted to", second)
    assert fitted is not None
    assert [float(value) for value in fitted[1].split(",")] == pytest.approx([5000, 300, 250, 5, 1], rel=0.01)
    for name in ("finished / refused / failed", "prompt tokens from the cache", "the same, cache without a limit"):
        assert values(first, name) == values(second, name)


def test_a_replay_that_differs_fails(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "events.log"
    assert main(["--trace", str(trace), *FAST, "--event-log", str(log)]) == 0
    data = log.read_bytes()
    changed = data.replace(b"\xa8max_seqs\x40", b"\xa8max_seqs\x01")  # 64 and 1 in msgpack
    assert changed != data
    log.write_bytes(changed)
    capsys.readouterr()
    assert main(["--replay", str(log)]) == 1
    assert "first difference: event " in capsys.readouterr().out


def test_a_replay_refuses_by_name_what_it_would_not_heed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--html", "page.html", "--limit", "5", "--cache-study", "--no-prefix-cache", "--max-seqs", "3"]
    assert main(["--replay", str(tmp_path / "any"), *flags]) == 2
    error = capsys.readouterr().err
    for flag in ("--html", "--limit", "--cache-study", "--prefix-cache", "--max-seqs"):
        assert flag in error
    assert "not with --replay" in error
    assert error.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error(trace: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    assert main(["--trace", str(trace), *FAST, "--event-log", str(log)]) == 0
    with subprocess.Popen(
        [sys.executable, "-m", "tools.simulate", "--replay", str(log)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_cache_study_prints_each_policy(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(trace), "--cache-study", "--kv-blocks", "30", "--json", str(tmp_path / "s.json")]) == 0
    out = capsys.readouterr().out
    assert "the cache holds 30" in out
    for name in ("lru", "lfu", "fifo", "belady (optimum)", "no limit"):
        assert len(values(out, name)) == 4
    (result,) = json.loads((tmp_path / "s.json").read_text())
    assert result["capacity"] == 30
    assert result["infinite"] == 39 * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batching", "magic"], "--batching: must be of continuous, dynamic, static, not 'magic'"),
        (["--cost", "1,2"], "--cost: must be 5 numbers"),
        (["--cost", "fit:/nowhere"], "/nowhere: No such file"),
        (["--sweep", "colour=1"], "--sweep: 'colour' is none of max-seqs"),
        (["--sweep", "max-seqs"], "--sweep: must be SETTING=V1,V2"),
        (["--sweep", "kv-blocks=0"], "--sweep kv-blocks: must be at least 1"),
        (["--sweep", "max-seqs=1,2,3,4,5,6,7,8,9"], "9 runs were asked for; at most 8"),
        (["--max-seqs", "0"], "--max-seqs: must be a whole number from 1 to 4096"),
        (["--policy", "luck"], "--policy: must be one of fcfs"),
        (["--max-seqs", "600", "--max-step-tokens", "512"], "--max-seqs 600: must not be more than --max-step-tokens"),
        (["--kv-tokens", "5"], "--kv-tokens 5: must hold one block of 16"),
        (["--event-log", "x", "--batching", "static"], "--event-log: records one run"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    flags: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(trace), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [["--limit", "0"], ["--rate-scale", "0"], ["--length-scale", "x"], ["--copy-us", "-1"], ["--kv-blocks", "1.5"]],
)
def test_bad_numbers_name_their_flag(flags: list[str], trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--trace", str(trace), *flags])
    assert stopped.value.code == 2
    assert f"argument {flags[0]}: must be" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words.txt"
    path.write_text("hello\n")
    assert main(["--trace", str(path)]) == 2
    assert "line 1:" in capsys.readouterr().err
    assert main(["--replay", str(path)]) == 2
    assert "not an event log" in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


class Balanced(HTMLParser):
    """Checks that tags close in order, and collects what a page would fetch."""

    VOID = frozenset({"meta", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_small_and_needs_nothing_else(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["--trace", str(trace), *FAST, "--batching", "static,dynamic,continuous", "--html", str(path)]) == 0
    text = path.read_text()
    assert len(text) < 200_000
    page = Balanced()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "url(" not in text
    assert "@import" not in text
    assert page.counts["svg"] == 6
    assert page.counts["figcaption"] == 6
    for label in ("static", "dynamic", "continuous"):
        assert text.count(label) >= 3  # legend, table, lines
    assert len(re.findall(r'class="line c[012]"', text)) == 15
    assert "nan" not in re.sub(r"<style>.*</style>", "", text).lower()


def test_names_are_escaped_in_the_page(trace: Path, tmp_path: Path) -> None:
    odd = trace.rename(tmp_path / "<b>&.jsonl")
    assert main(["--trace", str(odd), *FAST, "--limit", "5", "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;&amp;.jsonl" in text
    assert "<b>" not in text


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(0, 0.7) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert nice_ticks(3, 3) == [3]
    assert log_ticks(0.01, 10_000, (1,)) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000, 10_000])
    assert log_ticks(0.9, 30) == pytest.approx([1, 2, 5, 10, 20])
