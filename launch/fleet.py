"""The processes of a run, each in its place: what they are told, and how places are filled again.

A place is a role and an index. Its sockets belong to it and not to the process, so that a successor is found by
everyone who talked to its predecessor.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from config.machine import Machine
from config.schema import ChildSpec, Config, GenerationDefaults, ModelArch
from ipc.control import StartError
from launch.listen import free_loopback_port
from launch.process import Process
from launch.run_dir import RunDirectory

Role = Literal["frontend", "tokenizer", "scheduler", "worker"]
Place = tuple[Role, int]

ROLE_MODULES: Mapping[str, str] = {
    "frontend": "frontend.main",
    "tokenizer": "tokenizer_proc.main",
    "scheduler": "scheduler_proc.main",
    "worker": "gpu_workers.main",
}


class Engine(Struct, frozen=True, kw_only=True):
    """What all processes of a run are told."""

    config: Config
    arch: ModelArch
    model_path: str
    served_names: tuple[str, ...]
    kv_memory_bytes: int
    num_blocks: int
    num_host_blocks: int = 0
    rank_cpus: tuple[tuple[int, ...], ...] = ()  # of each rank's compute threads; empty: they are bound to none
    generation: GenerationDefaults = GenerationDefaults()
    gpu_bytes: int = 0  # of its GPU's memory that each rank may use; 0: ranks have none
    asked: Config | None = None  # what the user set, before it was resolved
    machine: Machine | None = None  # on which


class Fleet:
    """Starts processes; `modules` holds the module of each role's `main`, `on_change` is that of `Process`."""

    def __init__(
        self,
        engine: Engine,
        directory: RunDirectory,
        listener: socket.socket | None,
        modules: Mapping[str, str],
        on_change: Callable[[Process], None],
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._listener = listener
        self._modules = modules
        self._on_change = on_change
        self._incarnation = 0
        self._processes: dict[Place, Process] = {}

    @property
    def processes(self) -> list[Process]:
        """The latest of each place."""
        return list(self._processes.values())

    def of(self, role: Role) -> list[Process]:
        return [process for process in self._processes.values() if process.role == role]

    async def start_all(self) -> None:
        """Fill every place. StartError when the machine does not let it."""
        config = self._engine.config
        counts: dict[Role, int] = {
            "worker": config.worker.tp,
            "scheduler": 1,
            "tokenizer": config.tokenizer.tokenizers,
            "frontend": config.server.frontends,
        }
        await self._fill((role, index) for role, count in counts.items() for index in range(count))

    async def replace(self, ended: Iterable[Process]) -> list[Process]:
        """Successors of processes that have ended. StartError as in `start_all`."""
        ended = list(ended)
        # Those that were never ready have not told the scheduler of the crash before them.
        after_crash = any(
            process.crashed or (process.after_crash and not process.ready)
            for process in ended
            if process.role == "worker"
        )
        return await self._fill(((process.role, process.index) for process in ended), after_crash)

    async def _fill(self, places: Iterable[Place], after_crash: bool = False) -> list[Process]:
        """Start one process in each place; they share an incarnation, and the ranks among them a meeting point."""
        # Later than the last one even if the clock was set back: what is older is taken for a message of the dead.
        incarnation = self._incarnation = max(self._incarnation + 1, time.time_ns())
        rendezvous_port = free_loopback_port() if self._engine.config.worker.tp > 1 else 0
        started = []
        for role, index in places:
            spec = self._specification(role, index, incarnation, rendezvous_port, after_crash)
            process = Process(spec, self._on_change)
            try:
                file = self._directory.write_private(f"{role}-{index}.json", msgspec.json.encode(spec))
                await process.spawn(self._modules[role], file)
            except OSError as error:
                problem = f"{error.strerror or error} (the directory of this run is {self._directory.path})"
                raise StartError(f"{process.name} cannot be started: {problem}") from None
            self._processes[role, index] = process
            started.append(process)
        return started

    def _specification(
        self, role: Role, index: int, incarnation: int, rendezvous_port: int, after_crash: bool
    ) -> ChildSpec:
        return ChildSpec(
            role=role,
            index=index,
            config=self._engine.config,
            arch=self._engine.arch,
            model_path=self._engine.model_path,
            served_names=self._engine.served_names,
            endpoints=self._directory.endpoints,
            run_dir=str(self._directory.path),
            incarnation=incarnation,
            kv_memory_bytes=self._engine.kv_memory_bytes,
            num_blocks=self._engine.num_blocks,
            num_host_blocks=self._engine.num_host_blocks,
            cpus=self._engine.rank_cpus[index] if role == "worker" and self._engine.rank_cpus else (),
            listen_fd=self._listener.fileno() if role == "frontend" and self._listener is not None else -1,
            rendezvous_port=rendezvous_port if role == "worker" else 0,
            generation=self._engine.generation,
            after_crash=after_crash and role == "worker",
            gpu_bytes=self._engine.gpu_bytes if role == "worker" else 0,
            asked=self._engine.asked if role == "scheduler" else None,
            machine=self._engine.machine if role == "scheduler" else None,
        )
