"""The engine without HTTP: the ZeroMQ client SDK beside HTTP on one server, and `python -m tools.batch`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc import BadRequest, Client
from ipc.codec import pack_ints
from ipc.messages import SamplingParams, TextPrompt, TokenPrompt
from tests.e2e.server import REPOSITORY, START_SECONDS, Server, is_alive, process_role
from tests.e2e.sse import post_all


def test_the_sdk_gets_what_http_gets(server: Server, endpoint: str) -> None:
    question = "What is the capital of France?"
    chat, text = (
        post_all(server.url + path, [{"model": "smol", "temperature": 0, "max_tokens": 20, **body}])[0]
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}),
            ("/v1/completions", {"prompt": "1, 2, 3,"}),
        )
    )
    params = SamplingParams(temperature=0, max_tokens=20)
    with Client(endpoint, timeout=10) as client:
        assert client.model.names == ("smol",)
        answer = client.generate([{"role": "user", "content": question}], params)
        assert (answer.text, answer.finish_reason) == (chat.text, chat.finish_reason)
        assert answer.usage.completion_tokens == chat.usage["completion_tokens"]
        assert client.generate("1, 2, 3,", params).text == text.text
        ids = client.tokenize("1, 2, 3,").token_ids
        chunks = list(client.stream(ids, params))
        assert "".join(chunk.text for chunk in chunks) == text.text
        assert chunks[-1].finish_reason == text.finish_reason


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (TextPrompt("x"), SamplingParams(temperature=-1), "temperature"),
        (TextPrompt("x"), SamplingParams(max_tokens=9000), "max_tokens"),
        (TextPrompt(""), SamplingParams(), "prompt"),
        (TokenPrompt(pack_ints([49152])), SamplingParams(), "prompt"),
        (TokenPrompt(b"\0\0\0"), SamplingParams(), "prompt"),
        (TextPrompt("x"), SamplingParams(stop=("",)), "stop"),
    ],
)
def test_the_sdk_gets_the_same_errors(endpoint: str, prompt: Any, params: SamplingParams, param: str) -> None:
    with Client(endpoint, timeout=10) as client:
        with pytest.raises(BadRequest) as caught:
            client.generate(prompt, params)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert client.generate("a", max_tokens=1)


def run_batch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.batch", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    request = {"model": "smol", "prompt": "1, 2, 3,", "max_tokens": 6, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": request}) + "\n"


def engine_flags(model_path: Path) -> tuple[str, ...]:
    model = ("--model", str(model_path), "--served-model-name", "smol", "--dtype", "float32")
    return (*model, "--kv-memory", "64MiB", "--max-model-len", "512")


def test_a_batch_is_answered_and_can_be_resumed(model_path: Path, server: Server, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a") + line("bad", temperature=9) + "\n" + line("b", prompt="x", n=2))
    flags = engine_flags(model_path)
    done = run_batch(str(requests), str(answers), *flags)
    assert done.returncode == 1, "one answer is an error"
    assert "3/3 answered, 1 with an error" in done.stderr
    got = {answer["custom_id"]: answer["response"] for answer in map(json.loads, answers.read_text().splitlines())}
    assert {key: response["status_code"] for key, response in got.items()} == {"a": 200, "bad": 400, "b": 200}
    assert got["bad"]["body"]["error"]["param"] == "temperature"
    (over_http,) = post_all(server.url + "/v1/completions", [json.loads(line("a"))["body"]])
    assert got["a"]["body"]["choices"] == over_http.body["choices"]

    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:2]) + lines[2][:30])  # as an interruption leaves it
    resumed = run_batch(str(requests), str(answers), "--resume", *flags)
    assert resumed.returncode == 1, "an earlier run's answer is an error"
    assert "2 answered by an earlier run, 1 to go" in resumed.stderr
    assert sorted(json.loads(answer)["custom_id"] for answer in answers.read_text().splitlines()) == ["a", "b", "bad"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no request"),
        ("{", "line 1"),
        (line("a") + line("a"), "line 2: custom_id 'a' is already used in line 1"),
        (line("a", url="/v1/embeddings"), "line 1"),
        (line("a", stream=True), "line 1: stream"),
    ],
)
def test_a_bad_file_is_refused_before_anything_starts(tmp_path: Path, content: str, message: str) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(content)
    done = run_batch(str(requests), str(answers), "--model", "nowhere.gguf")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not answers.exists()


def test_an_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a"))
    answers.write_text("precious")
    done = run_batch(str(requests), str(answers), "--model", "nowhere.gguf")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    resumed = run_batch(str(requests), str(answers), "--resume", "--model", "nowhere.gguf")
    assert resumed.returncode == 2, "there is nothing an interruption can have cut off before the first line's end"
    assert answers.read_text() == "precious"


def test_an_engine_that_does_not_start_leaves_no_output(tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a"))
    done = run_batch(str(requests), str(answers), "--model", "nowhere.gguf")
    assert done.returncode == 2
    assert "the engine did not start" in done.stderr
    assert "Traceback" not in done.stderr
    assert not answers.exists()


class Batch:
    """A batch of eight long requests under way: all processes are there, and some answers."""

    def __init__(self, folder: Path, model_path: Path) -> None:
        requests, self.answers = folder / "in.jsonl", folder / "out.jsonl"
        self.names = {f"r{number}" for number in range(8)}
        requests.write_text(
            "".join(line(name, prompt=name, max_tokens=100, ignore_eos=True) for name in sorted(self.names))
        )
        arguments = (str(requests), str(self.answers), "--concurrency", "2", *engine_flags(model_path))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.batch", *arguments],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children: list[psutil.Process] = []

    def wait_for_answers(self, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.answers.exists() or self.answers.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"no answer yet: {self.process.communicate()[1]}")
            time.sleep(0.02)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def assert_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=20)
        left = [child for child in alive if is_alive(child)]
        for child in left:
            child.kill()
        assert not left


def test_a_batch_outlives_the_death_of_a_worker(tmp_path: Path, model_path: Path) -> None:
    batch = Batch(tmp_path, model_path)
    batch.wait_for_answers(1)
    (worker,) = (child for child in batch.children if process_role(child) == "worker-0")
    worker.kill()
    _, stderr = batch.process.communicate(timeout=START_SECONDS)
    assert "restarting worker 0" in stderr
    assert batch.process.returncode == 0, stderr
    got = [json.loads(answer) for answer in batch.answers.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in got) == sorted(batch.names)
    assert {answer["response"]["status_code"] for answer in got} == {200}
    batch.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_batch_takes_its_engine_with_it(
    tmp_path: Path, model_path: Path, number: signal.Signals, status: int
) -> None:
    batch = Batch(tmp_path, model_path)
    batch.wait_for_answers(1)
    batch.process.send_signal(number)
    if number == signal.SIGKILL:
        batch.process.wait(20)
    else:
        _, stderr = batch.process.communicate(timeout=20)
        assert "--resume" in stderr
        assert "Traceback" not in stderr
    assert batch.process.returncode == status
    batch.assert_nothing_is_left()
    got = [json.loads(answer)["response"]["status_code"] for answer in batch.answers.read_text().splitlines()]
    assert set(got) == {200}, "what was cut off has no answer"
    assert len(got) < len(batch.names)


def test_a_full_disk_is_one_clear_line(tmp_path: Path, model_path: Path) -> None:
    """As seen by the batch: a limit on the size of its files, which holds some of the answers."""
    batch = Batch(tmp_path, model_path)
    batch.wait_for_answers(1)
    limit = batch.answers.stat().st_size + 1000
    psutil.Process(batch.process.pid).rlimit(psutil.RLIMIT_FSIZE, (limit, limit))
    _, stderr = batch.process.communicate(timeout=START_SECONDS)
    assert batch.process.returncode == 2, stderr
    assert "Traceback" not in stderr
    assert f"{batch.answers}: File too large" in stderr
    assert "--resume" in stderr
    for answer in batch.answers.read_bytes().splitlines():
        assert json.loads(answer)["response"]["status_code"] == 200
