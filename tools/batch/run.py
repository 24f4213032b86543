"""A whole batch: an engine, its client, and a number of requests under way at once."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence

from ipc.engine_client import EngineClient
from tools.batch.answering import Answerer
from tools.batch.answers_file import AnswersFile
from tools.batch.engine import Engine, engine
from tools.batch.errors import BatchError, StoppedBySignal
from tools.batch.progress import Progress
from tools.batch.requests_file import BatchLine

_CONNECT_SECONDS = 60.0


async def run(lines: Sequence[BatchLine], answers: AnswersFile, concurrency: int, flags: Sequence[str]) -> None:
    """Start an engine and answer all lines.

    Raises `BatchError` when it cannot go on, `StoppedBySignal` after SIGINT or SIGTERM; the engine has ended then.
    """
    await _until_signal(_run(lines, answers, concurrency, flags))


async def _run(lines: Sequence[BatchLine], answers: AnswersFile, concurrency: int, flags: Sequence[str]) -> None:
    async with engine(flags) as running:
        client = EngineClient(running.endpoints)
        try:
            answers.open()
            await _answer_all(lines, answers, concurrency, running, client)
        finally:
            await client.close()  # before the engine stops, which would wait for what still runs


async def _answer_all(
    lines: Sequence[BatchLine], answers: AnswersFile, concurrency: int, running: Engine, client: EngineClient
) -> None:
    try:
        model = await client.connect(_CONNECT_SECONDS)
    except TimeoutError:
        raise BatchError(f"the engine did not answer within {_CONNECT_SECONDS:g} seconds") from None
    answerer = Answerer(client, model)
    progress = Progress(len(lines))
    waiting = iter(lines)

    async def work() -> None:
        for line in waiting:
            answer = await answerer.answer(line)
            answers.write(line.custom_id, answer.status, answer.body)
            progress.add(answer.status != 200, answer.tokens)

    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(running.watch())
            workers = [group.create_task(work()) for _ in range(min(concurrency, len(lines)))]
            await asyncio.gather(*workers)
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        progress.show()


async def _until_signal(work: Coroutine[None, None, None]) -> None:
    """Run `work`, cancelling it on SIGINT or SIGTERM; a second signal cancels what it does for a clean end."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not received:
            print(f"\n{number.name}: stopping the engine", file=sys.stderr, flush=True)
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if received:
            raise StoppedBySignal(received[0]) from None
        raise
