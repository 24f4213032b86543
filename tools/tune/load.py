"""Runs of the load generator against a server that is being tuned or measured."""

import asyncio
import os
import signal
import time

from tools.loadgen.messages import Target
from tools.loadgen.runner import Run, Runner
from tools.loadgen.schedule import Schedule
from tools.loadgen.servers import adapted, look

_TOKENS = (1000, 30000)  # ids that prompts are made of
_SEEDS = 1 << 62


async def target_at(url: str) -> Target:
    """The server there. Raises `ServerError`."""
    target = Target(url=url)
    found, _ = adapted(target, await look(target), timings=False)
    return found


async def send(schedule: Schedule, target: Target, name: str) -> Run:
    """Send it all. Raises `RunError`, and KeyboardInterrupt when a signal has ended the run early."""
    run = await Runner(
        schedule,
        target,
        run_id=f"tune-{name}-{time.time_ns() // 1_000_000:x}",
        processes=max(1, min(4, (os.cpu_count() or 1) // 2)),
        content_seed=time.time_ns() % _SEEDS,  # other tokens each time, which no cache has
        token_range=_TOKENS,
        words=(),
        records_file=None,
    ).run()
    end_on_signals()  # which the runner has taken to itself meanwhile
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def end_on_signals() -> None:
    """SIGINT and SIGTERM cancel the running task, so that its server ends with it."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
