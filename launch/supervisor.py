"""Starts the processes of the engine, watches them, and ends them together.

What does not belong here: one process's pipes (`launch.process`), what each is told (`launch.fleet`), which ones hang
(`launch.heartbeat`) or are replaced after a death (`launch.recovery`), sockets and directories (`launch.listen`,
`launch.run_dir`), and anything that knows what a role does.

Life of a run: start all -> all ready -> dead ones are replaced -> a signal comes, or there is no recovery -> all end.
"""

import asyncio
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from ipc.control import Drain, Fail, StartError
from launch.fleet import ROLE_MODULES, Engine, Fleet, Role
from launch.heartbeat import Heartbeats
from launch.listen import address_of, reachable
from launch.process import Process
from launch.progress import StartDisplay
from launch.recovery import Recovery
from launch.run_dir import RunDirectory
from launch.sdk_edge import addresses

_FAIL_SECONDS = 2.0  # for the others to tell their clients, once one process has died
_LAST_WORDS_SECONDS = 0.3  # of that, what even a second signal leaves them
_EXIT_SECONDS = 0.5  # for an idle process to end by itself
_TERM_SECONDS = 1.0  # between TERM and KILL
_KILL_SECONDS = 5.0  # for the system to end a killed process; one that waits for a broken device may never end

_SHUTTING_DOWN = "the server is shutting down and could not wait for this request to finish"


class Supervisor:
    """Runs the engine until it is told to stop or cannot go on; `modules` holds the module of each role's `main`."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket | None,
        display: StartDisplay,
        modules: Mapping[str, str] = ROLE_MODULES,
    ) -> None:
        """StartError when there is no place for the run's directory."""
        self._engine = engine
        self._settings = engine.config.supervisor
        self._listener = listener
        self._display = display
        self._directory = RunDirectory(engine.config.tokenizer.tokenizers, frontends=engine.config.server.frontends)
        self._fleet = Fleet(engine, self._directory, listener, modules, self._on_change)
        self._recovery = Recovery(self._settings, self._fleet, display)
        self._heartbeats = Heartbeats(self._fleet, self._settings.hang_timeout)
        self._changed = asyncio.Event()
        self._signals = 0
        self._failure: str | None = None  # why the engine is lost
        self._died = False

    def run(self) -> int:
        """Exit status: 0 when stopped by a signal and nothing had died, else 1."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with self._directory:
            try:
                if await self._start():
                    self._announce()
                    self._recovery.active = True
                    await self._until(lambda: self._signals > 0)
                    self._recovery.active = False
                    await self._drain()
            finally:
                await self._end_all()
        return 1 if self._died or self._failure is not None or self._signals > 1 else 0

    # --- events ---

    def _on_signal(self) -> None:
        self._signals += 1
        self._changed.set()

    def _on_change(self, process: Process) -> None:
        if not process.alive and not process.told_to_end:
            self._died = True
            self._recovery.died(process)
        elif process.alive:
            self._display.stage(process.name, process.stage, process.fraction)
            if process.unresponsive is not None and self._recovery.hangs(process.unresponsive):
                self._died = True
        self._changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `done()`, replacing dead processes meanwhile; False when the time is up or the engine is lost."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            looks_again = self._find_hanging()
            problem = await self._recovery.step()
            self._failure = self._failure or problem
            if self._failure is not None:
                return False
            if done():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            await self._wait_change(min(filter(None, (deadline, self._recovery.deadline, looks_again)), default=None))

    def _find_hanging(self) -> float | None:
        """Take processes that hang for dead, while those that die are replaced; when to look again."""
        if not self._recovery.active:  # who loads or drains has time limits of its own
            return None
        for process in self._heartbeats.look(time.monotonic()):
            self._died = True
            self._recovery.died(process)
        return self._heartbeats.deadline

    async def _wait_change(self, deadline: float | None) -> bool:
        """Wait until something has changed since the last call; False when that takes too long."""
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait_for(self._changed.wait(), wait)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    # --- start ---

    async def _start(self) -> bool:
        """True when all are ready; else `_failure` says why, or a signal came."""
        try:
            await self._fleet.start_all()
        except StartError as error:
            self._failure = str(error)
            return False
        timeout = self._settings.ready_timeout
        finished = await self._until(lambda: self._signals > 0 or all(p.ready for p in self._fleet.processes), timeout)
        if not finished and self._failure is None:
            late = ", ".join(f"{p.name} is at '{p.stage}'" for p in self._fleet.processes if not p.ready)
            self._failure = f"not ready within {timeout:g} seconds: {late}. A larger --ready-timeout gives more time."
        return finished and not self._signals

    def _announce(self) -> None:
        clients = " ".join(self._directory.endpoints.clients)
        scheme = "https" if self._engine.config.server.tls_cert else "http"
        address = clients if self._listener is None else address_of(self._listener, scheme)
        sys.stdout.write(f"ready {address}\n")
        sys.stdout.flush()
        config = self._engine.config
        if further := " ".join(addresses(config.sdk, config.tokenizer.tokenizers)):
            self._display.note(f"clients of the SDK: {further}{', with keys' if config.sdk.sdk_keys else ''}")
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
        seconds = self._settings.drain_timeout
        self._display.say(f"draining: running requests get {seconds:g} seconds; a second signal stops at once")
        deadline = time.monotonic() + seconds
        for role in get_args(Role):
            group = self._fleet.of(role)
            # Ranks may take the end of their scheduler for the end of everything; that is no death.
            unneeded = self._fleet.processes if role == "scheduler" else group
            self._recovery.forget(unneeded)
            for process in unneeded:
                process.told_to_end = True
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
        # A successor that is still starting has taken nothing on yet.
        return self._signals > 1 or all(process.idle or not (process.alive and process.ready) for process in group)

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
        alive = [process for process in self._fleet.processes if process.alive]
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
        await self._wait_exits(_KILL_SECONDS, None)
        for process in self._fleet.processes:
            if process.alive:
                left = f"{process.name} (process {process.pid}) does not end even when killed, and is left behind"
                self._failure = self._failure or left
                self._display.say(left)

    async def _wait_exits(self, seconds: float, patience: int | None) -> None:
        """Wait for all to end; with `patience`, the signals so far, a further signal or the second cuts it short."""
        deadline = time.monotonic() + seconds
        while any(process.alive for process in self._fleet.processes):
            if patience is not None and (self._signals != patience or self._signals > 1):
                return
            if not await self._wait_change(deadline):
                return
