"""A rank that can't start leaves the group of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from config.schema import Config
from gpu_workers import worker
from gpu_workers.comm import LocalComm
from ipc.control import StartError


class Recorded(LocalComm):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("error", [StartError("no weights"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_the_group_is_left_when_loading_fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    comm = Recorded()

    def fail(*arguments: object) -> None:
        assert comm in arguments
        raise error

    monkeypatch.setattr(worker, "make_backend", lambda *arguments, **named: object())
    monkeypatch.setattr(worker, "make_comm", lambda *arguments: comm)
    monkeypatch.setattr(worker, "load_model", fail)
    spec: Any = SimpleNamespace(config=Config(), cpus=(), index=0, rendezvous_port=1, gpu_bytes=0)
    control: Any = SimpleNamespace(stage=lambda *arguments: None)
    with pytest.raises(type(error)):
        worker.Worker(spec, control)
    assert comm.closed == 1
