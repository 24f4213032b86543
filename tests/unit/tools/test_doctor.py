"""What the doctor says where there is no diagnosis."""

import http.server
import os
import threading
from collections.abc import Iterator

import msgspec
import pytest

from frontend.diagnosis import DiagnosisObject
from tools.doctor.__main__ import DoctorError, main
from tools.doctor.report import amount, certainty

EMPTY = msgspec.json.encode(DiagnosisObject(0.0, 30.0, 0, 0, "nothing", {}, []))
ANSWERS = {
    "/refused/diagnose": (401, b'{"error": {"message": "no key", "type": "t", "param": null, "code": null}}'),
    "/broken/diagnose": (500, b"<html>"),
    "/other/diagnose": (200, b'{"hello": 1}'),
    "/deep/diagnose": (200, b"[" * 200_000),
    "/deeperror/diagnose": (500, b"[" * 200_000),
    "/bytes/diagnose": (200, b"\xff\xfe"),
    "/html/diagnose": (200, b"<html>"),
    "/older/diagnose": (200, EMPTY),
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the environment named none."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def nobody(*_: object, **__: object) -> None:
    """Nothing outside of this machine is looked for."""
    raise OSError("no such name")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("refused", "401: no key"),
        ("broken", "500: Internal Server Error"),
        ("other", "not a diagnosis of this version of tokenmill"),
        ("deep", "not a diagnosis of this version of tokenmill"),
        ("deeperror", "500: Internal Server Error"),
        ("bytes", "not a diagnosis of this version of tokenmill"),
        ("html", "not a diagnosis of this version of tokenmill"),
        ("older", "not a diagnosis of this version: no 'running'"),
    ],
)
def test_an_answer_that_is_no_diagnosis_is_one_line(
    url: str, path: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", f"{url}/{path}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert problem in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_this_machine(
    url: str, host: str, variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens where the proxy is said to be."""
    without_proxies(monkeypatch)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert main(["--url", url.replace("127.0.0.1", host) + "/older", "--json"]) == 0
    assert capsys.readouterr().out.encode() == EMPTY + b"\n"


def test_other_machines_are_asked_through_the_proxy(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is told the whole address."""
    without_proxies(monkeypatch)
    monkeypatch.setenv("http_proxy", url)
    asked = "http://far.example.org:8000/older"
    monkeypatch.setitem(ANSWERS, f"{asked}/diagnose", (200, EMPTY))
    assert main(["--url", asked, "--json"]) == 0
    assert capsys.readouterr().out.encode() == EMPTY + b"\n"
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setattr("socket.getaddrinfo", nobody)
    assert main(["--url", asked, "--json"]) == 1
    assert "no such name" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["other", "deep", "bytes", "html"])
def test_what_is_no_diagnosis_is_none_as_json_either(url: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{url}/{path}", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


def test_watching_goes_on_while_the_server_is_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([EMPTY, DoctorError("it is away"), DoctorError("it is away"), EMPTY])

    def fetch(url: str, key: str) -> bytes:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, DoctorError):
            raise answer
        return answer

    monkeypatch.setattr("tools.doctor.__main__.fetch", fetch)
    monkeypatch.setattr("tools.doctor.__main__._PERIOD", 0.0)
    assert main(["--url", "http://127.0.0.1:9", "--watch", "--json"]) == 130
    printed = capsys.readouterr()
    assert printed.out.encode() == (EMPTY + b"\n") * 2
    assert printed.err == "error: it is away\n" * 2


@pytest.mark.parametrize("url", ["http://[", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_an_address_that_looks_like_one_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: http://")
    assert err.count("\n") == 1


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9: ")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://a b", ""])
def test_an_address_that_is_none_is_told_as_such(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--url", url])
    assert stopped.value.code == 2
    assert "must be such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_units_and_words() -> None:
    assert amount("ttft", 0.01234) == "12.3 ms"
    assert amount("itl_p99", 2.5) == "2.5 s"
    assert amount("throughput", 1234.56) == "1235 tokens/s"
    assert amount("concurrency", 3.25) == "3.25"
    assert [certainty(value) for value in (0.9, 0.5, 0.1)] == ["sure", "likely", "a guess"]
