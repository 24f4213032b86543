"""The private directory of one run: its sockets and the specifications of its processes.

A launcher that is killed outright cannot remove its directory; the next one does, since the lock in it is then free.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from config.schema import Endpoints
from ipc.control import StartError

_PREFIX = "tokenmill-"
_LOCK = "lock"
_MAX_SOCKET_PATH = 107  # bytes; sockaddr_un holds 108 with the closing zero (unix(7))


class RunDirectory:
    """A fresh directory that only this user may enter; use as a context manager."""

    def __init__(self, tokenizers: int, environ: Mapping[str, str] = os.environ, *, frontends: int = 1) -> None:
        parents = [Path(environ["XDG_RUNTIME_DIR"])] if environ.get("XDG_RUNTIME_DIR") else []
        parents.append(Path(tempfile.gettempdir()))
        self.path = self._create(parents, tokenizers)
        self.endpoints = _endpoints(self.path, tokenizers, frontends)
        try:
            self._lock: IO[bytes] | None = (self.path / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise StartError(f"{self.path / _LOCK}: {error.strerror}") from None

    @staticmethod
    def _create(parents: list[Path], tokenizers: int) -> Path:
        problems = []
        for parent in parents:
            _remove_abandoned(parent)
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
            except OSError as error:
                problems.append(f"{parent}: {error.strerror}")
                continue
            longest = max(len(os.fsencode(socket)) for socket in _socket_paths(path, tokenizers))
            if longest <= _MAX_SOCKET_PATH:
                return path
            path.rmdir()
            problems.append(f"{parent}: a socket path there has {longest} bytes, at most {_MAX_SOCKET_PATH} work")
        raise StartError(
            f"No directory can be made for this run's sockets ({'; '.join(problems)}). "
            "Set TMPDIR to a writable directory with a short path."
        )

    def write_private(self, name: str, content: bytes) -> Path:
        """A new file that only this user may read, in place of an older one of that name."""
        path = self.path / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return path

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _socket_paths(path: Path, tokenizers: int) -> list[Path]:
    clients = [path / f"clients-{index}.sock" for index in range(tokenizers)]
    return [*clients, path / "scheduler.sock", path / "workers.sock", path / "stats.sock"]


def _endpoints(path: Path, tokenizers: int, frontends: int) -> Endpoints:
    *clients, scheduler, workers, stats = (f"ipc://{socket}" for socket in _socket_paths(path, tokenizers))
    counts = {"scheduler": 1, "tokenizer": tokenizers, "frontend": frontends}
    traces = {
        f"{role}-{index}": f"ipc://{path}/trace-{role[0]}{index}"  # no longer than the longest of the others
        for role, count in counts.items()
        for index in range(count)
    }
    return Endpoints(clients=tuple(clients), scheduler=scheduler, workers=workers, stats=stats, traces=traces)


def _remove_abandoned(parent: Path) -> None:
    """Remove our own directories in `parent` whose launcher no longer lives."""
    for path in parent.glob(_PREFIX + "*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, or not a run directory
