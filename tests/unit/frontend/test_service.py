"""What a frontend says of the engine behind it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from config.schema import Config, Endpoints
from frontend import service
from frontend.errors import ApiError
from frontend.metrics import Metrics
from frontend.service import Service
from ipc.engine_client import EngineClient
from ipc.messages import ModelInfo
from tests.processes.frontend.test_lifecycle import STATS


def test_ready_only_while_the_scheduler_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(service.time, "monotonic", lambda: now)
    client = cast(EngineClient, SimpleNamespace(model=ModelInfo(("m",), 100, 100, 0, True)))
    endpoints = Endpoints(clients=(), scheduler="", workers="", stats="")
    spec = cast(Any, SimpleNamespace(config=Config(), arch=None, served_names=(), index=0, endpoints=endpoints))
    one = Service(spec, client, cast(Metrics, None))
    one.on_stats(STATS)
    now += 9.0
    one.check_ready()
    now += 7.0
    with pytest.raises(ApiError, match="the scheduler has reported nothing for 16 s") as refusal:
        one.check_ready()
    assert refusal.value.status == 503
    one.on_stats(STATS)
    one.check_ready()
