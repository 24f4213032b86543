"""Files that the scheduler records in, for the launcher and for the scheduler itself: what may stand in their way.

A file of an earlier run is kept as PATH.old; nothing else is ever replaced.
"""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from config.output_files import check_output
from config.sources import ConfigError


class Recording(Struct, frozen=True):
    """One kind of such files."""

    flag: str
    name: str  # with its article
    magic: bytes  # with which it begins


EVENT_LOG = Recording("--event-log", "an event log", b"tmevents")
TRACE = Recording("--record", "a recorded trace", b'{"block_size":')


def is_of_kind(kind: Recording, path: Path) -> bool:
    """Whether a file begins like one of `kind`; OSError when it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(kind.magic)) == kind.magic


def in_the_way(kind: Recording) -> str:
    """What is said of a file that is none of `kind`."""
    return f"this is there already, and is not {kind.name}"


def _is_replaceable(kind: Recording, path: str) -> bool:
    """Whether nothing is there, an empty file, or one of `kind`; OSError when it cannot be read."""
    if not os.path.lexists(path):
        return True
    return os.path.isfile(path) and (not os.path.getsize(path) or is_of_kind(kind, Path(path)))


def check_recording(kind: Recording, file: str) -> None:
    """ConfigError when `file` cannot be written as things are; nothing is created or changed."""
    check_output(kind.flag, file)
    try:
        if not _is_replaceable(kind, file):
            raise ConfigError(f"{kind.flag} {file}: {in_the_way(kind)}")
    except OSError as error:
        raise ConfigError(f"{kind.flag} {file}: {error.strerror}") from None
    folder = Path(file).absolute().parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{kind.flag} {file}: this user may not write into {folder}, where an earlier one is renamed")


def create_recording(kind: Recording, path: str, buffering: int) -> BinaryIO:
    """A new file, readable by its owner only; an earlier one is kept as PATH.old.

    OSError when it cannot be written, or when something else is there.
    """
    if not _is_replaceable(kind, path):
        raise OSError(errno.EEXIST, in_the_way(kind))
    if os.path.lexists(path):
        os.replace(path, path + ".old")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "wb", buffering=buffering)
