"""The engine without HTTP: the ZeroMQ client SDK beside HTTP on one server, and `python -m tools.batch`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipc.client import Client, RequestFailed
from ipc.codec import pack_ints
from ipc.messages import ChatMessage, ChatPrompt, SamplingParams, TextPrompt, TokenPrompt
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.sse import post_all


@pytest.fixture
def endpoint(server: Server) -> str:
    """Where the server's own stderr says that ZeroMQ clients connect."""
    found = re.search(r"ZeroMQ clients: (\S+?)\)?$", server.stderr, re.MULTILINE)
    assert found, server.stderr
    return found[1]


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
    with Client([endpoint], timeout=10) as client:
        assert client.model.names == ("smol",)
        answer, end = client.generate(ChatPrompt((ChatMessage("user", question),)), params)[0]
        assert (answer, end.reason) == (chat.text, chat.finish_reason)
        assert end.completion_tokens == chat.usage["completion_tokens"]
        assert client.generate(TextPrompt("1, 2, 3,"), params)[0][0] == text.text


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
    with Client([endpoint], timeout=10) as client:
        with pytest.raises(RequestFailed) as caught:
            client.generate(prompt, params)
        assert caught.value.failed.status == 400
        assert caught.value.failed.param == param
        assert client.generate(TextPrompt("a"), SamplingParams(max_tokens=1))


def run_batch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.batch", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    request = {"model": "smol", "prompt": "1, 2, 3,", "max_tokens": 6, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": request}) + "\n"


def test_a_batch_is_answered_and_can_be_resumed(model_path: Path, server: Server, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a") + line("bad", temperature=9) + "\n" + line("b", prompt="x", n=2))
    flags = ("--model", str(model_path), "--served-model-name", "smol", "--dtype", "float32", "--kv-memory", "64MiB")
    done = run_batch(str(requests), str(answers), *flags, "--max-model-len", "512")
    assert done.returncode == 1, "one answer is an error"
    assert "3/3 answered, 1 with an error" in done.stderr
    got = {answer["custom_id"]: answer["response"] for answer in map(json.loads, answers.read_text().splitlines())}
    assert {key: response["status_code"] for key, response in got.items()} == {"a": 200, "bad": 400, "b": 200}
    assert got["bad"]["body"]["error"]["param"] == "temperature"
    (over_http,) = post_all(server.url + "/v1/completions", [json.loads(line("a"))["body"]])
    assert got["a"]["body"]["choices"] == over_http.body["choices"]

    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:2]) + lines[2][:30])  # as an interruption leaves it
    resumed = run_batch(str(requests), str(answers), "--resume", *flags, "--max-model-len", "512")
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
    assert answers.read_text() == "precious"
