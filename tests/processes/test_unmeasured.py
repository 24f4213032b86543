"""What processes do, and do not, with `--no-measure`; beside each, that they do it without the flag."""

import asyncio
import time
from pathlib import Path

import pytest

from ipc.engine_messages import TokenizerReport
from ipc.messages import TextPrompt

from . import test_scheduler, test_tokenizer
from .fake_engine import FakeEngine
from .frontend.process import Frontend, wait_until
from .test_scheduler import run, until
from .test_tokenizer import eventually

HEADER = "x-tokenmill-timings"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
_LOOKS = 0.5  # seconds in which a process would have looked at its loop several times


@pytest.mark.parametrize("measure", [True, False], ids=["measured", "unmeasured"])
def test_the_scheduler_looks_at_its_loop_and_diagnoses(tmp_path: Path, measure: bool) -> None:
    async def body() -> None:
        async with test_scheduler.running(tmp_path, measure=measure) as (setting, tokenizer):
            setting.start_ranks()
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            setting.ask_for_diagnosis(True)
            tokenizer.submit(1, [1, 2, 3], 10)
            await until(lambda: 1 in tokenizer.ended)
            if measure:
                await until(lambda: bool(setting.diagnoses) and bool(setting.stats[-1].processes[0].lags))
            else:
                await asyncio.sleep(4 * _LOOKS)
                assert setting.diagnoses == []
                assert setting.stats[-1].processes[0].lags == ()
            assert setting.stats[-1].generated_tokens == 10
            assert setting.stats[-1].processes[0].cpu_seconds > 0
        assert setting.errors == []

    run(body)


@pytest.mark.parametrize("measure", [True, False], ids=["measured", "unmeasured"])
def test_a_tokenizer_looks_at_its_loop(tmp_path_factory: pytest.TempPathFactory, measure: bool) -> None:
    async def body() -> None:
        async with test_tokenizer.running(tmp_path_factory.mktemp("t"), measure=measure) as setting:
            assert (await setting.complete(TextPrompt("hello"), max_tokens=5))[0] == "hello"

            def reports() -> list[TokenizerReport]:
                return [told for told in setting.scheduler.of(TokenizerReport) if isinstance(told, TokenizerReport)]

            before = len(reports())
            await eventually(lambda: len(reports()) > before + 2, "three reports")
            assert bool(reports()[-1].usage.lags) == measure
            assert reports()[-1].usage.cpu_seconds > 0

    asyncio.run(body())


def test_a_frontend_says_what_it_does_not_measure(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    frontend = Frontend(tmp_path, engine, measure=False).wait_until_ready()
    try:
        for path in ("/diagnose", "/debug/requests", "/debug/requests/one"):
            answer = frontend.request("GET", path)
            assert answer.status == 404, path
            assert answer.error()["code"] == "not_measured"
            assert "--no-measure" in answer.error()["message"]
        refused = frontend.request("POST", "/v1/chat/completions", CHAT, {HEADER: "1"})
        assert (refused.status, refused.error()["param"]) == (400, HEADER)
        assert "--no-measure" in refused.error()["message"]
        for headers in ({}, {HEADER: "0"}):
            answer = frontend.request("POST", "/v1/chat/completions", CHAT, headers)
            assert answer.status == 200
            assert "timings" not in answer.json()
        exported = frontend.request("GET", "/metrics").body.decode()
        assert 'tokenmill:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 2.0' in exported
        assert "time_to_first_token" not in exported
        assert "event_loop_lag" not in exported
        time.sleep(2 * _LOOKS)  # once a second it would report
        assert engine.reports == []
        assert frontend.request("GET", "/health/live").status == 200
    finally:
        frontend.close()
        engine.close()
    assert b"Traceback" not in frontend.stderr


def test_a_measuring_frontend_does_all_that(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    frontend = Frontend(tmp_path, engine).wait_until_ready()
    try:
        answer = frontend.request("POST", "/v1/chat/completions", CHAT, {HEADER: "1"})
        assert answer.json()["timings"]["choices"]
        assert len(frontend.request("GET", "/debug/requests").json()["requests"]) == 1
        assert frontend.request("GET", "/diagnose").status == 200
        assert b"time_to_first_token" in frontend.request("GET", "/metrics").body
        wait_until(lambda: bool(engine.reports))
    finally:
        frontend.close()
        engine.close()
