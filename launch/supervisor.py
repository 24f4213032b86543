"""Starts the processes of the engine, watches them, and ends them together.

What does not belong here: one process's pipes (`launch.process`), sockets and directories (`launch.listen`,
`launch.run_dir`), and anything that knows what a role does.

Life of a run: start all -> all ready -> one dies, or a signal comes -> all end. After a death everything is started
again, on the same listening socket and the same socket paths, until there were too many deaths within a minute.
"""

import asyncio
import json
import shlex
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from config.schema import ChildSpec, Config, ModelArch
from ipc.control import Drain, Fail
from launch.listen import address_of, free_loopback_port, reachable
from launch.process import Process
from launch.progress import StartDisplay
from launch.run_dir import RunDirectory

Role = Literal["frontend", "tokenizer", "scheduler", "worker"]

ROLE_MODULES: Mapping[str, str] = {
    "frontend": "frontend.main",
    "tokenizer": "tokenizer_proc.main",
    "scheduler": "scheduler_proc.main",
    "worker": "gpu_workers.main",
}

_FAIL_SECONDS = 2.0  # for the others to tell their clients, once one process has died
_LAST_WORDS_SECONDS = 0.3  # of that, what even a second signal leaves them
_EXIT_SECONDS = 0.5  # for an idle process to end by itself
_TERM_SECONDS = 1.0  # between TERM and KILL
_RESTART_WINDOW = 60.0  # seconds in which deaths are counted


_SHUTTING_DOWN = "the server is shutting down and could not wait for this request to finish"


class Engine(Struct, frozen=True, kw_only=True):
    """What all processes of a run are told."""

    config: Config
    arch: ModelArch
    model_path: str
    served_names: tuple[str, ...]
    kv_memory_bytes: int
    num_blocks: int


class Supervisor:
    """Runs the engine until it is told to stop or cannot go on; `modules` holds the module of each role's `main`."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket | None,
        display: StartDisplay,
        modules: Mapping[str, str] = ROLE_MODULES,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._display = display
        self._modules = modules
        self._processes: list[Process] = []
        self._changed = asyncio.Event()
        self._signals = 0
        self._failure: str | None = None  # why this start of the engine is lost

    def run(self) -> int:
        """Exit status: 0 when stopped by a signal and nothing had died, else 1."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        allowed = self._engine.config.supervisor.max_restarts
        deaths: deque[float] = deque()
        died = False
        started_once = False
        with RunDirectory(self._engine.config.tokenizer.tokenizers) as directory:
            while True:
                try:
                    if await self._start(directory):
                        self._announce(directory, again=started_once)
                        started_once = True
                        await self._until(lambda: self._signals > 0)
                        await self._drain()
                finally:
                    await self._end_all()
                if self._failure is None:
                    return 1 if died or self._signals > 1 else 0
                died = True
                now = time.monotonic()
                deaths.append(now)
                while deaths[0] < now - _RESTART_WINDOW:
                    deaths.popleft()
                if not started_once or self._signals:
                    return 1
                if len(deaths) > allowed:
                    if allowed:
                        self._display.say(f"giving up: --max-restarts allows {allowed} within a minute")
                    return 1
                directory.forget_sockets()
                self._display.restart()
                self._display.say(f"starting again ({len(deaths)} of {allowed} within a minute)")

    # --- events ---

    def _on_signal(self) -> None:
        self._signals += 1
        self._changed.set()

    def _on_change(self, process: Process) -> None:
        if process.start_failure is not None and not process.told_to_end:
            self._failure = self._failure or f"{process.name} could not start: {process.start_failure}"
        elif not process.alive and not process.told_to_end:
            self._failure = self._failure or process.ending()
        elif process.alive:
            self._display.stage(process.name, process.stage, process.fraction)
        self._changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `done()`; False when the time is up or the engine is lost."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            if self._failure is not None:
                return False
            if not await self._wait_change(deadline):
                return False
        return True

    async def _wait_change(self, deadline: float | None) -> bool:
        self._changed.clear()
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait_for(self._changed.wait(), wait)
        except TimeoutError:
            return False
        return True

    # --- start ---

    async def _start(self, directory: RunDirectory) -> bool:
        """True when all are ready; else `_failure` says why, or a signal came."""
        self._failure = None
        self._processes = []
        for spec in self._specifications(directory):
            process = Process(spec, self._on_change)
            self._processes.append(process)
            file = directory.write_private(f"{spec.role}-{spec.index}.json", msgspec.json.encode(spec))
            await process.spawn(self._modules[spec.role], file)
        timeout = self._engine.config.supervisor.ready_timeout
        finished = await self._until(lambda: self._signals > 0 or all(p.ready for p in self._processes), timeout)
        if not finished and self._failure is None:
            late = ", ".join(f"{p.name} is at '{p.stage}'" for p in self._processes if not p.ready)
            self._failure = f"not ready within {timeout:g} seconds: {late}. A larger --ready-timeout gives more time."
        return finished and not self._signals

    def _specifications(self, directory: RunDirectory) -> list[ChildSpec]:
        config = self._engine.config
        counts: dict[Role, int] = {
            "worker": config.worker.tp,
            "scheduler": 1,
            "tokenizer": config.tokenizer.tokenizers,
            "frontend": config.server.frontends,
        }
        incarnation = time.time_ns()
        rendezvous_port = free_loopback_port() if config.worker.tp > 1 else 0
        return [
            ChildSpec(
                role=role,
                index=index,
                config=config,
                arch=self._engine.arch,
                model_path=self._engine.model_path,
                served_names=self._engine.served_names,
                endpoints=directory.endpoints,
                run_dir=str(directory.path),
                incarnation=incarnation,
                kv_memory_bytes=self._engine.kv_memory_bytes,
                num_blocks=self._engine.num_blocks,
                listen_fd=self._listener.fileno() if role == "frontend" and self._listener is not None else -1,
                rendezvous_port=rendezvous_port if role == "worker" else 0,
            )
            for role, count in counts.items()
            for index in range(count)
        ]

    def _announce(self, directory: RunDirectory, again: bool) -> None:
        clients = " ".join(directory.endpoints.clients)
        address = clients if self._listener is None else address_of(self._listener)
        if again:
            self._display.say(f"ready again: {address}")
            return
        sys.stdout.write(f"ready {address}\n")
        sys.stdout.flush()
        if self._listener is None:
            self._display.say(f"ready: ZeroMQ clients: {clients}")
            return
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = json.dumps({"model": self._engine.served_names[0], "messages": question, "stream": True})
        self._display.say(f"ready: {address} (ZeroMQ clients: {clients})")
        self._display.note(
            f"try: curl -N {reachable(address)}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(body)}"
        )

    # --- end ---

    async def _drain(self) -> None:
        """Let running requests finish, then end the roles in the order in which requests come in."""
        if self._failure is not None:
            return
        seconds = self._engine.config.supervisor.drain_timeout
        self._display.say(f"draining: running requests get {seconds:g} seconds; a second signal stops at once")
        deadline = time.monotonic() + seconds
        for role in get_args(Role):
            group = [process for process in self._processes if process.role == role]
            for process in self._processes:
                # Ranks may take the end of their scheduler for the end of everything; that is no death.
                process.told_to_end |= process in group or role == "scheduler"
            for process in group:
                process.order(Drain())
            rest = max(_EXIT_SECONDS, deadline - time.monotonic())
            quiet = await self._until(partial(self._is_quiet, group), rest)
            if self._failure is not None or self._signals > 1:
                return
            if not quiet:
                self._display.say(f"{role}: still busy after the drain timeout")
                for process in group:
                    process.order(Fail(_SHUTTING_DOWN))
            await self._end(group)

    def _is_quiet(self, group: list[Process]) -> bool:
        return self._signals > 1 or all(process.idle or not process.alive for process in group)

    async def _end(self, group: list[Process]) -> None:
        """End processes that have nothing left to do."""

        def gone() -> bool:
            return self._signals > 1 or not any(process.alive for process in group)

        if not await self._until(gone, _EXIT_SECONDS) and self._failure is None:
            for process in group:
                process.send_signal(signal.SIGTERM)
            await self._until(gone, _TERM_SECONDS)

    async def _end_all(self) -> None:
        """Whatever still lives ends now, but first it is told why, and has time to tell its clients."""
        if self._failure is not None:
            self._display.say(self._failure)
        alive = [process for process in self._processes if process.alive]
        patience = self._signals
        for process in alive:
            process.told_to_end = True
            process.order(Fail(self._failure or _SHUTTING_DOWN))
        if any(process.ready for process in alive):
            await self._wait_exits(_LAST_WORDS_SECONDS, None)
            if self._failure is not None:
                await self._wait_exits(_FAIL_SECONDS - _LAST_WORDS_SECONDS, patience)
        for process in alive:
            process.send_signal(signal.SIGTERM)
        await self._wait_exits(_TERM_SECONDS, patience)
        for process in alive:
            process.send_signal(signal.SIGKILL)
        while any(process.alive for process in self._processes):
            await self._wait_change(None)

    async def _wait_exits(self, seconds: float, patience: int | None) -> None:
        """Wait for all to end; with `patience`, the signals so far, a further signal or the second cuts it short."""
        deadline = time.monotonic() + seconds
        while any(process.alive for process in self._processes):
            if patience is not None and (self._signals != patience or self._signals > 1):
                return
            if not await self._wait_change(deadline):
                return
