"""The scheduler process with --event-log, on real sockets: what it wrote replays, a loss of its ranks included."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from config.schema import SchedulerConfig
from ipc.control import StartError
from scheduler_proc.event_log import EventLog
from scheduler_proc.events import Arrived, EngineLost, EngineReady
from scheduler_proc.main import Scheduler
from tests.processes import test_scheduler
from tests.processes.test_scheduler import Setting, run, running
from tests.unit.ipc.test_channels import until
from tests.unit.scheduler_proc.fake_worker import continuation
from tools.simulate.observer import Status
from tools.simulate.replay import replay


def test_a_recorded_process_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.log"
    monkeypatch.setattr(test_scheduler, "SchedulerConfig", partial(SchedulerConfig, event_log=str(path)))
    prompts = {number: [number, 2, 3, 4, 5, 6] for number in range(1, 5)}

    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            [first] = setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            for request_id, prompt in prompts.items():
                tokenizer.submit(request_id, prompt, 9)
            while len(tokenizer.tokens[1]) < 4:
                if first.plans:
                    first.work()
                await asyncio.sleep(0.001)
            first.die()
            await until(lambda: not setting.stats[-1].engine_ready)
            setting.start_ranks()
            await until(lambda: len(tokenizer.ended) == len(prompts))
            for request_id, prompt in prompts.items():
                assert tokenizer.tokens[request_id] == continuation(prompt, 9, frozenset())
            await until(lambda: len(list(EventLog(path))) > 10)  # on disk while the process still runs

    run(body)
    result = replay(path, keep_outputs=True)
    assert result.difference == ""
    assert result.equal == result.plans > 9
    assert result.observer.status.tolist() == [Status.FINISHED] * len(prompts)
    assert result.observer.num_tokens.tolist() == [9] * len(prompts)
    kinds = [type(entry.event) for entry in result.log]
    assert [kinds.count(kind) for kind in (Arrived, EngineReady, EngineLost)] == [4, 2, 1]
    assert not result.log.cut


def test_a_log_that_cannot_be_created_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nowhere" / "events.log"
    monkeypatch.setattr(test_scheduler, "SchedulerConfig", partial(SchedulerConfig, event_log=str(path)))
    setting = Setting(tmp_path, 1)
    with pytest.raises(StartError, match=f"--event-log {path}: No such file or directory"):
        Scheduler(setting.spec, setting.launcher)  # type: ignore[arg-type]
