"""The load generator against a server that stalls, breaks off and lies: what is counted, and from when."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.processes.mock_openai import MockServer, Stream, words
from tools.loadgen.__main__ import main
from tools.loadgen.words import CANDIDATES

REPOSITORY = Path(__file__).resolve().parents[2]
# A test machine may be busy: what the client says of itself is not what these tests are about.
LENIENT = ("--max-send-lag-ms", "1e6", "--max-loop-lag-ms", "1e6", "--max-cpu", "100")


def write_trace(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def outputs(path: Path, lengths: Sequence[int]) -> str:
    """A trace of short prompts with these output lengths, 5 ms apart."""
    return write_trace(
        path,
        [{"timestamp": 5 * at, "input_length": 3, "output_length": length} for at, length in enumerate(lengths)],
    )


class Result:
    """Exit status, records and the report of a run in this process."""

    def __init__(self, folder: Path, mock: MockServer, *flags: str) -> None:
        records, report = folder / "records.jsonl", folder / "report.json"
        self.status = main(["--url", mock.url, "--records", str(records), "--json", str(report), *LENIENT, *flags])
        self.records = [json.loads(line) for line in records.read_text().splitlines()]
        self.report = json.loads(report.read_text())
        self.summary = self.report.get("summary")


def test_every_request_due_in_a_stall_shows_the_rest_of_it(tmp_path: Path) -> None:
    with MockServer(stall=(0.5, 2.0)) as mock:
        flags = ("--arrivals", "fixed:20", "--requests", "60", "--input-tokens", "5", "--output-tokens", "3")
        result = Result(tmp_path, mock, *flags)
        begin, end = mock.stall_window
    assert result.status == 0
    assert len(result.records) == 60
    start = result.report["started_monotonic"]
    bounds = []
    for record in result.records:
        due = start + record["scheduled"]
        rest = end - due if begin <= due < end else 0.0
        bounds.append(rest)
        assert record["times"][0] - record["scheduled"] >= rest
        assert record["scheduled"] <= record["sent"] <= record["written"] <= record["times"][0]
    assert sum(bound > 0 for bound in bounds) == 40  # 2 seconds of 20 a second: all were sent, none waited for another
    ttft = result.summary["ttft"]
    assert ttft["n"] == 60
    assert ttft["p50"]["value"] >= np.percentile(bounds, 50)
    assert ttft["p90"]["value"] >= np.percentile(bounds, 90)
    assert ttft["mean"] >= np.mean(bounds)


def start_command(url: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.loadgen", "--url", url, *flags],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def sending_workers(process: subprocess.Popen[str], mock: MockServer) -> list[psutil.Process]:
    """The workers, once requests arrive."""
    deadline = time.monotonic() + 60
    while not mock.bodies:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return psutil.Process(process.pid).children()


def test_a_run_whose_client_was_held_up_is_void(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with MockServer() as mock:
        flags = ("--arrivals", "fixed:50", "--requests", "150", "--output-tokens", "2", "--input-tokens", "4")
        process = start_command(mock.url, *flags, "--json", str(report), "--html", str(tmp_path / "page.html"))
        [worker] = sending_workers(process, mock)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        worker.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "VOID: the load generator was the bottleneck" in out
    client = json.loads(report.read_text())["summary"]["client"]
    assert client["send_lag"]["max"] > 0.5
    assert client["loop_lag"]["p99"] > 0.5
    assert len(client["void"]) >= 2
    assert "VOID" in (tmp_path / "page.html").read_text()


def test_tokens_are_what_the_server_says_b093(tmp_path: Path) -> None:
    """100 tokens of one space each are one token for any tokenizer that sees them again."""

    async def spaces(stream: Stream) -> None:
        for _ in range(100):
            await stream.chunk(" ")
        await stream.chunk("", "length")
        await stream.end(100)

    with MockServer(behaviours={100: spaces}) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [100, 100]))
    assert result.summary["output_tokens"] == 200
    assert result.summary["output_exact"]["exact"] == 2
    assert result.summary["itl"]["n"] == 2 * 99
    tpot = [(record["times"][-1] - record["times"][0]) / 99 for record in result.records]
    assert result.summary["tpot"]["p50"]["value"] == pytest.approx(np.median(tpot))


@pytest.mark.parametrize("owner", ["tokenmill", "vllm"])
def test_tokens_of_a_chunk_count_as_many(owner: str, tmp_path: Path) -> None:
    async def threes(stream: Stream) -> None:
        by_usage = "continuous_usage_stats" in stream.body["stream_options"]
        for at in range(3):
            ids, usage = (None, 3 * (at + 1)) if by_usage else ([7, 8, 9], None)
            await stream.chunk("abc", token_ids=ids, usage=usage)
        await stream.chunk("", "length", usage=9 if by_usage else None)
        await stream.end(9)

    with MockServer(behaviours={9: threes}, owner=owner) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [9]))
    [record] = result.records
    assert record["tokens"] == [3, 3, 3]
    first, _, last = record["times"]
    assert result.summary["icl"]["mean"] == pytest.approx((last - first) / 2)
    assert result.summary["itl"]["n"] == 6
    assert result.summary["itl"]["mean"] == pytest.approx((last - first) / 6)
    assert result.summary["tpot"]["mean"] == pytest.approx((last - first) / 8)


def test_chunks_are_not_taken_for_tokens_when_their_number_differs(tmp_path: Path) -> None:
    async def lumps(stream: Stream) -> None:
        for _ in range(3):
            await stream.chunk("abc")
        await stream.chunk("", "length")
        await stream.end(9)

    with MockServer(behaviours={9: lumps}) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [9]))
    assert result.summary["uncounted"] == 1
    assert result.summary["itl"]["n"] == 0
    assert result.summary["output_tokens"] == 9


async def only_done(stream: Stream) -> None:
    await stream.write(b"data: [DONE]\n\n")


async def breaks_off(stream: Stream) -> None:
    await stream.chunk(" half")
    await stream.cut()


async def error_event(stream: Stream) -> None:
    await stream.chunk(" half")
    await stream.event({"error": {"message": "the engine is gone"}})


async def no_done(stream: Stream) -> None:
    await stream.chunk(" all", "length")


async def no_finish(stream: Stream) -> None:
    await stream.chunk(" half")
    await stream.write(b"data: [DONE]\n\n")


async def no_token(stream: Stream) -> None:
    await stream.chunk("", "stop")
    await stream.end(0)


async def nonsense(stream: Stream) -> None:
    await stream.chunk(" half")
    await stream.write(b"data: {not json\n\n")


async def deep_event(stream: Stream) -> None:
    await stream.chunk(" half")
    await stream.write(b'data: {"error": ' + b"[" * 200_000 + b"\n\n")


async def negative_usage(stream: Stream) -> None:
    await stream.chunk(" all", "length")
    await stream.end(-5)


async def endless_usage(stream: Stream) -> None:
    await stream.chunk(" all", "length")
    await stream.end(10**30)


async def never(stream: Stream) -> None:
    await stream.mock.stopped()


FAILING = {
    11: ("empty", only_done),
    12: ("truncated", breaks_off),
    13: ("error", error_event),
    14: ("truncated", no_done),
    15: ("truncated", no_finish),
    16: ("empty", no_token),
    17: ("error", nonsense),
    18: ("error", deep_event),
    19: ("error", negative_usage),
    20: ("error", endless_usage),
    401: ("refused", None),
    402: ("refused", None),
    403: ("http", None),
}


def test_what_is_no_answer_is_a_failure_and_no_latency_b095(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    behaviours = {length: behaviour for length, (_, behaviour) in FAILING.items() if behaviour is not None}
    good = 20
    with MockServer(behaviours=behaviours) as mock:
        trace = outputs(tmp_path / "trace", [*FAILING, *[3] * good])
        result = Result(tmp_path, mock, "--trace", trace, "--slo", "ttft=100s")
    assert result.status == 0
    expected = {"ok": good}
    for outcome, _ in FAILING.values():
        expected[outcome] = expected.get(outcome, 0) + 1
    assert result.summary["outcomes"] == expected
    found = {record["output_length"]: record["outcome"] for record in result.records}
    assert found == {3: "ok"} | {length: outcome for length, (outcome, _) in FAILING.items()}
    for name in ("ttft", "tpot", "e2e"):
        assert result.summary[name]["n"] == good
    answered = [record for record in result.records if record["outcome"] == "ok"]
    ttft = [record["times"][0] - record["scheduled"] for record in answered]
    assert result.summary["ttft"]["p50"]["value"] == pytest.approx(np.median(ttft))
    assert min(ttft) > 0
    listed = result.summary["failures"]
    assert {failure["id"] for failure in listed} == {
        record["id"] for record in result.records if record["outcome"] != "ok"
    }
    goodput = result.summary["goodput"]
    assert goodput["met"] == good
    assert goodput["share"] == pytest.approx(good / (good + len(FAILING)))  # failures are misses
    out = capsys.readouterr().out
    assert "the engine is gone" in out
    assert "429: told to say 429" in out


def test_when_nothing_is_answered_the_status_says_so(tmp_path: Path) -> None:
    with MockServer(behaviours={11: only_done, 12: never}) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [11, 12]), "--timeout", "0.5")
    assert result.status == 1
    assert result.summary["outcomes"] == {"empty": 1, "timeout": 1}
    assert result.summary["ttft"] == {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None}


@pytest.mark.parametrize(("api", "added"), [("tokens", 0), ("text", 0), ("chat", 7)])
def test_200_prompts_of_1024_tokens_are_exact_b096(api: str, added: int, tmp_path: Path) -> None:
    hard = frozenset(CANDIDATES[5::9])
    with MockServer(hard_words=hard, template_tokens=7) as mock:
        flags = ("--requests", "200", "--input-tokens", "1024", "--output-tokens", "2", "--arrivals", "fixed:400")
        result = Result(tmp_path, mock, *flags, "--api", api)
        counted = [mock.count(body) for body in mock.bodies[-200:]]
    assert counted == [1024 + added] * 200
    assert result.summary["prompt_exact"] == {"compared": 200, "exact": 200, "differences": {}}
    assert {record["prompt_tokens"] for record in result.records} == {1024 + added}
    if api != "tokens":
        assert f"adds {added} tokens" in result.report["notes"][-1]


def test_prompts_that_are_not_exact_are_told(tmp_path: Path) -> None:
    async def miscounts(stream: Stream) -> None:
        stream.body["prompt"] += [1, 2]
        await words(stream)

    with MockServer(behaviours={5: miscounts}) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [3, 5, 5]))
    assert result.summary["prompt_exact"] == {"compared": 3, "exact": 1, "differences": {"2": 2}}


def test_requests_are_dealt_to_processes_and_can_be_told_apart(tmp_path: Path) -> None:
    with MockServer() as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2] * 12), "--processes", "3")
        seen = [headers["x-request-id"] for headers in mock.headers]
    assert sorted(seen) == sorted(record["id"] for record in result.records)
    assert len(set(seen)) == 12
    assert {record["index"]: record["worker"] for record in result.records} == {at: at % 3 for at in range(12)}
    assert {record["index"]: record["scheduled"] for record in result.records} == {
        at: pytest.approx(at * 0.005) for at in range(12)
    }
    assert len(result.summary["client"]["cpu"]) == 3


def test_a_shared_prefix_is_shared_and_another_run_has_another(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [7, 8, 9], "block_size": 4},
        {"timestamp": 9, "input_length": 7, "output_length": 1, "hash_ids": [7, 5], "block_size": 4},
    ]
    trace = write_trace(tmp_path / "trace", rows)
    with MockServer() as mock:
        for seed in ("1", "1", "2"):
            # One after the other: what is sent together may arrive in any order.
            Result(tmp_path, mock, "--trace", trace, "--content-seed", seed, "--arrivals", "closed:1")
        prompts = [body["prompt"] for body in mock.bodies]
    assert [len(prompt) for prompt in prompts] == [10, 7] * 3
    assert prompts[0][:4] == prompts[1][:4]
    assert prompts[0][4:7] != prompts[1][4:7]
    assert prompts[:2] == prompts[2:4]
    assert prompts[0][:4] != prompts[4][:4]


def test_bodies_and_texts_are_sent_as_they_are(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "top_p": 0.5}
    batch = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}]
    texts = [{"session_id": "s", "timestamp_us": 5, "input": "What now?", "output": "Nothing."}]
    with MockServer() as mock:
        Result(tmp_path, mock, "--trace", write_trace(tmp_path / "batch", batch))
        Result(tmp_path, mock, "--trace", write_trace(tmp_path / "bare", [{"prompt": "Once", "max_tokens": 1}]))
        Result(tmp_path, mock, "--trace", write_trace(tmp_path / "texts", texts), "--api", "chat", "--text-output", "4")
        first, second, third = mock.bodies
    stream = {"model": "mock-model", "stream": True, "stream_options": {"include_usage": True}}
    assert first == chat | stream
    assert second == {"prompt": "Once", "max_tokens": 1} | stream
    assert third["messages"] == [{"role": "user", "content": "What now?"}]
    assert third["max_tokens"] == 4


def test_closed_users_wait_for_their_answers(tmp_path: Path) -> None:
    with MockServer() as mock:
        flags = ("--arrivals", "closed:3,0.01", "--requests", "13", "--output-tokens", "2", "--input-tokens", "4")
        result = Result(tmp_path, mock, *flags, "--processes", "2")
    assert len(result.records) == 13
    by_user: dict[int, list[dict[str, Any]]] = {}
    for record in sorted(result.records, key=lambda record: record["index"]):
        by_user.setdefault(record["index"] % 3, []).append(record)
    for records in by_user.values():
        assert len({record["worker"] for record in records}) == 1
        for before, after in itertools.pairwise(records):
            assert after["scheduled"] >= before["ended"] + 0.01


def test_an_interrupted_run_reports_what_was_done(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    with MockServer(behaviours={12: never}) as mock:
        rows = [{"timestamp": 0, "input_length": 3, "output_length": length} for length in [2] * 5 + [12] * 2]
        rows.append({"timestamp": 1e6, "input_length": 3, "output_length": 2})
        trace = write_trace(tmp_path / "trace", rows)
        process = start_command(mock.url, "--trace", trace, "--records", str(records), *LENIENT)
        while len(mock.bodies) < 7:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted: 3 requests were not sent or not waited for" in out
    outcomes = sorted(json.loads(line)["outcome"] for line in records.read_text().splitlines())
    assert outcomes == ["cancelled"] * 2 + ["ok"] * 5


def test_a_worker_that_dies_ends_the_run_with_an_error() -> None:
    with MockServer() as mock:
        flags = ("--arrivals", "fixed:50", "--requests", "5000", "--output-tokens", "2", "--input-tokens", "4")
        process = start_command(mock.url, *flags, "--processes", "2", *LENIENT)
        sending_workers(process, mock)[0].kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: a worker process ended with status -9" in err
    assert "Traceback" not in err
    assert "TTFT" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "/nowhere/trace"], "/nowhere/trace: No such file"),
        (["--find-rate"], "--find-rate: needs --slo"),
        (["--find-rate", "--slo", "ttft=1s", "--arrivals", "closed:3"], "--find-rate: not with closed users"),
        (["--arrivals", "trace"], "--arrivals trace: there is no --trace"),
        (["--arrivals", "closed:2", "--rate-scale", "2"], "--rate-scale: not with closed users"),
        (["--arrivals", "closed:2", "--duration", "2"], "--duration: with closed users also --requests"),
        (["--arrivals", "closed:2", "--cooldown", "2"], "--cooldown: with closed users it needs --duration"),
        (["--requests", "9999999"], "--requests, --duration: 9,999,999 requests are more than 1,000,000"),
        (["--requests", "3", "--warmup", "100"], "nothing is left of the run"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder /nowhere does not exist"),
        (["--model", "other"], "--model other: not served there; the server has mock-model"),
        (["--sdk", "nowhere"], "--sdk nowhere: must be ZeroMQ addresses such as"),
        (["--sdk", ""], "--sdk : must be ZeroMQ addresses such as"),
        (["--url", "nowhere"], "--url nowhere: this is no address of a server"),
        (["--url", "http://[::1"], "--url http://[::1: this is no address of a server"),
        (["--limit", "5"], "--limit: only with --trace"),
        (["--length-scale", "2"], "--length-scale: only with --trace"),
        (["--json", "new", "--html", "new"], "--html new: the same file as that of --json"),
        (["--trace", "new", "--records", "new"], "--records new: the same file as that of --trace"),
        (["--sdk", "ipc:///nowhere/clients-0"], "--sdk ipc:///nowhere/clients-0: no engine there"),
        (["--sdk-key", "k"], "--sdk-key: only with --sdk"),
        (["--sdk", "tcp://h:1", "--sdk-key", "k"], "--sdk-key: needs --sdk-server-key as well"),
        (["--sdk", "tcp://h:1", "--sdk-server-key", "k"], "--sdk-server-key: needs --sdk-key as well"),
        (["--sdk", "tcp://h:1", "--sdk-key", "k", "--sdk-server-key", "k"], "--sdk-server-key: a public key has 40"),
        (
            ["--sdk", "tcp://h:1", "--sdk-key", "/nowhere/k", "--sdk-server-key", "k" * 40],
            "--sdk-key /nowhere/k: No such file",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_gets_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.loadgen.sdk.CONNECT_SECONDS", 0.2)
    with MockServer() as mock:
        assert main(["--url", mock.url, *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo", "ttft=5"], "argument --slo: must be limits such as"),
        (["--arrivals", "poisson:0"], "argument --arrivals: must be trace"),
        (["--input-tokens", "normal:5"], "argument --input-tokens: must be N"),
        (["--token-range", "5:5"], "argument --token-range: must be LOW:HIGH"),
        (["--requests", "0"], "argument --requests: must be at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_values_name_their_flag(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --url http://127.0.0.1:9: ")
    assert err.count("\n") == 1


def test_options_of_made_up_requests_are_refused_beside_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = outputs(tmp_path / "trace", [2])
    for flag in ("--input-tokens", "--output-tokens"):
        assert main(["--trace", trace, flag, "5"]) == 2
        assert capsys.readouterr().err == f"error: {flag}: not with --trace, which has lengths of its own\n"


def test_a_full_disk_costs_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer() as mock:
        for flag in ("--records", "--json", "--html"):
            trace = outputs(tmp_path / "trace", [2] * 3)
            assert main(["--url", mock.url, *LENIENT, "--trace", trace, flag, "/dev/full"]) == 2
            printed = capsys.readouterr()
            assert re.search(r"^answered +3$", printed.out, re.MULTILINE)
            assert "No space left on device" in (printed.out if flag == "--records" else printed.err)


def test_records_of_an_earlier_run_stay_when_there_is_no_server(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.write_text("earlier\n")
    assert main(["--url", "http://127.0.0.1:9", "--records", str(records)]) == 2
    assert records.read_text() == "earlier\n"


def test_a_phase_without_a_request_is_told_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": at, "input_length": 3, "output_length": 2} for at in (0, 9000)]
    with MockServer() as mock:
        trace = write_trace(tmp_path / "trace", rows)
        assert main(["--url", mock.url, "--trace", trace, "--warmup", "3", "--cooldown", "3"]) == 2
        assert not mock.bodies
    assert "nothing is left of the run to be measured" in capsys.readouterr().err


def test_more_processes_than_requests_are_not_started(tmp_path: Path) -> None:
    with MockServer() as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]), "--processes", "999999999")
    assert len(result.summary["client"]["cpu"]) == 1


@pytest.mark.parametrize(
    "models",
    [
        "[1]",
        '{"data": null}',
        '{"data": ["a"]}',
        '{"data": [{"name": "a"}]}',
        '{"data": [{"id": "a", "max_model_len": "4096"}]}',
        "<html>",
        "[" * 200_000,
    ],
    ids=["list", "null", "texts", "no-id", "length", "html", "deep"],
)
def test_models_that_are_none_get_one_line(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(models=models) as mock:
        assert main(["--url", mock.url]) == 2
    err = capsys.readouterr().err
    assert "/v1/models is not what OpenAI's servers answer" in err
    assert err.count("\n") == 1


def test_a_compressed_stream_is_no_answer(tmp_path: Path) -> None:
    with MockServer(encoding="gzip") as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]))
        [headers] = mock.headers
    assert headers["accept-encoding"] == "identity"
    assert result.summary["outcomes"] == {"error": 1}
    assert "compressed (gzip)" in result.summary["failures"][0]["detail"]
