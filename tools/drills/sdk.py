"""The client SDK under what it promises: many requests at once, cancelled ones, a restart; its time beside HTTP's."""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from ipc import AsyncClient, Completion, RequestFailed
from tools.drills import sdk_package
from tools.drills.progress import Progress
from tools.drills.server import MODEL_NAME, http, server
from tools.reports.table import render

HELP = """\
Three parts. The package: installed size and import time, in a folder with nothing but the wheel, pyzmq and msgspec.
Latency: short requests (a few words, one token), one after the other, in turns over the SDK and over HTTP. Endurance:
many requests at once over one connection, some of which their caller cancels; when a third has been answered, the
server is ended and started again at the same address. Each request must end with a result or a typed error; results
are compared with what the same prompts got before.
"""

_PROMPTS = 20
_IMPORTS = 7
_WARM_UP = 20  # requests of each way that are not counted
_CANCEL_SECONDS = 0.02  # between one cancelled request and the next
_LATE_SECONDS = 10.0  # after the deadline, in which a call must have ended


async def run(options: Namespace) -> None:
    """Print all three parts. SystemExit when a promise is broken."""
    print_package(await asyncio.to_thread(sdk_package.measure, _IMPORTS))
    with tempfile.TemporaryDirectory(prefix="tm-sdk-") as folder:
        address = f"ipc://{folder}/sdk.sock"
        flags = ("--sdk-listen", address)
        client = AsyncClient(address, retries=options.retries)
        try:
            async with server(options.model, *flags) as url, http() as session:
                await client.connect()
                print_latency(await latency(client, session, url, options.latency_requests))
                expected = await references(client, options.output_tokens)
                endurance = Endurance(client, expected, options)
                await endurance.first_part()
            print(f"  the server has ended after {endurance.answered} answers; starting it again", file=sys.stderr)
            async with server(options.model, *flags):
                await endurance.second_part()
        finally:
            await client.close()
    endurance.report()


def print_package(installed: sdk_package.Installed) -> None:
    sizes = ", ".join(f"{name} {size / 1024:.0f} KiB" for name, size in installed.sizes.items())
    print(f"installed: {sizes}; the wheel itself {installed.wheel / 1024:.0f} KiB")
    print(
        f"import: {1e3 * installed.import_seconds:.0f} ms, of which pyzmq, msgspec and asyncio "
        f"{1e3 * installed.dependencies_seconds:.0f} ms (medians of {_IMPORTS} new interpreters)"
    )


# --- latency ---


async def latency(
    client: AsyncClient, session: aiohttp.ClientSession, url: str, requests: int
) -> dict[str, list[float]]:
    """Seconds of each request, by the way it took."""
    body = {"model": MODEL_NAME, "prompt": "One two three", "max_tokens": 1, "temperature": 0}

    async def over_sdk() -> None:
        await client.generate("One two three", max_tokens=1, temperature=0)

    async def over_http() -> None:
        async with session.post(url + "/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.json()

    ways: dict[str, Callable[[], Awaitable[None]]] = {"SDK": over_sdk, "HTTP": over_http}
    found: dict[str, list[float]] = {name: [] for name in ways}
    with Progress("short requests", requests) as progress:
        for number in range(_WARM_UP + requests):
            for name, ask in ways.items():
                started = time.perf_counter()
                await ask()
                if number >= _WARM_UP:
                    found[name].append(time.perf_counter() - started)
            progress.step()
    return found


def print_latency(found: dict[str, list[float]]) -> None:
    rows = []
    for name, seconds in found.items():
        deciles = statistics.quantiles(seconds, n=10)
        rows.append((name, [f"{1e3 * value:.2f}" for value in (statistics.median(seconds), deciles[0], deciles[8])]))
    ratio = statistics.median(found["SDK"]) / statistics.median(found["HTTP"])
    print(f"\n{len(found['SDK'])} requests of one token, one at a time, in turns; ms")
    print(render(["p50", "p10", "p90"], rows))
    print(f"SDK / HTTP at the median: {ratio:.3f}")


# --- endurance ---


def prompt(number: int) -> str:
    return f"Item {number % _PROMPTS} of the list is"


async def references(client: AsyncClient, tokens: int) -> list[Completion]:
    """What each prompt is answered by when nothing disturbs."""
    asked = (client.generate(prompt(number), max_tokens=tokens, temperature=0) for number in range(_PROMPTS))
    return list(await asyncio.gather(*asked))


@dataclass(slots=True)
class Ends:
    """How the requests have ended."""

    kinds: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    different: int = 0  # results that are not what the prompt gets otherwise
    untyped: list[str] = field(default_factory=list)
    wrongly_cancelled: int = 0


class Endurance:
    """All requests, over both lives of the server."""

    def __init__(self, client: AsyncClient, expected: Sequence[Completion], options: Namespace) -> None:
        self._client = client
        self._expected = expected
        self._options = options
        self._ends = Ends()
        self._rng = random.Random(7)
        self._tasks: list[asyncio.Task[Completion]] = []
        self._cancelled: set[int] = set()
        self._began = 0.0
        self._most_at_once = 0
        self._to_cancel = round(options.requests * options.cancel_share)

    @property
    def answered(self) -> int:
        return sum(task.done() for task in self._tasks)

    async def first_part(self) -> None:
        """Send all, cancel some of them, and return when a third has ended."""
        requests = self._options.requests
        self._began = time.perf_counter()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(requests)]
        # Half of those that are cancelled before the restart, the others after it.
        await self._cancel_while(self._to_cancel // 2, lambda: self.answered < requests // 3)

    async def second_part(self) -> None:
        """Cancel the others, and wait for all to end; none may outlast its deadline."""
        await self._cancel_while(self._to_cancel, lambda: self.answered < len(self._tasks))
        left = self._began + self._options.deadline + _LATE_SECONDS - time.perf_counter()
        _, hanging = await asyncio.wait(self._tasks, timeout=max(0.0, left))
        self.seconds = time.perf_counter() - self._began
        self.hanging = len(hanging)
        for task in hanging:
            task.cancel()

    async def _ask(self, number: int) -> Completion:
        return await self._client.generate(
            prompt(number), max_tokens=self._options.output_tokens, temperature=0, deadline=self._options.deadline
        )

    async def _cancel_while(self, quota: int, goes_on: Callable[[], bool]) -> None:
        """Until there are so many in all, cancel one after the other of those that run."""
        limit = self._began + self._options.deadline + _LATE_SECONDS
        while goes_on() and time.perf_counter() < limit:
            await asyncio.sleep(_CANCEL_SECONDS)
            self._most_at_once = max(self._most_at_once, self._client.live_requests)
            running = [number for number, task in enumerate(self._tasks) if not task.done()]
            if running and len(self._cancelled) < quota:
                number = self._rng.choice(running)
                self._tasks[number].cancel()
                self._cancelled.add(number)

    def report(self) -> None:
        """Print how all ended; SystemExit when one of them did as none may."""
        ends = self._ends
        for number, task in enumerate(self._tasks):
            self._take(number, task)
        print(
            f"\n{len(self._tasks)} requests at once over one connection (at most {self._most_at_once} under way), "
            f"{len(self._cancelled)} cancelled, the server restarted once; {self.seconds:.1f} s"
        )
        for kind, count in ends.kinds.most_common():
            print(f"  {count:5d} {kind}")
        print(f"  attempts of the results: {', '.join(f'{n}: {count}' for n, count in sorted(ends.attempts.items()))}")
        print(f"  results that differ from the undisturbed ones: {ends.different}; hanging: {self.hanging}")
        if self.hanging or ends.different or ends.untyped or ends.wrongly_cancelled:
            raise SystemExit(f"broken: {ends.untyped[:3] or 'see above'}")

    def _take(self, number: int, task: asyncio.Task[Completion]) -> None:
        ends = self._ends
        if task.cancelled():
            ends.kinds["cancelled by their caller"] += 1
            ends.wrongly_cancelled += number not in self._cancelled
            return
        error = task.exception()
        if error is None:
            answer = task.result()
            ends.kinds["results"] += 1
            ends.attempts[answer.attempts] += 1
            ends.different += answer.text != self._expected[number % _PROMPTS].text
        else:
            ends.kinds[f"{type(error).__name__}: {error}"] += 1
            if not isinstance(error, RequestFailed):
                ends.untyped.append(repr(error))
