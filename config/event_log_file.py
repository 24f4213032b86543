"""What may stand in the way of the scheduler's event log, for the launcher and for the scheduler itself."""

import os
from pathlib import Path

from config.output_files import check_output
from config.sources import ConfigError

MAGIC = b"tmevents"  # with which an event log begins

IN_THE_WAY = "this is there already, and is no event log"


def is_event_log(path: Path) -> bool:
    """Whether a file begins like one; OSError when it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_replaceable(path: str) -> bool:
    """Whether nothing is there, an empty file, or an event log; OSError when it cannot be read."""
    if not os.path.lexists(path):
        return True
    return os.path.isfile(path) and (not os.path.getsize(path) or is_event_log(Path(path)))


def check_event_log(file: str) -> None:
    """ConfigError when `--event-log` cannot be written as things are; nothing is created or changed."""
    check_output("--event-log", file)
    try:
        if not is_replaceable(file):
            raise ConfigError(f"--event-log {file}: {IN_THE_WAY}")
    except OSError as error:
        raise ConfigError(f"--event-log {file}: {error.strerror}") from None
    folder = Path(file).absolute().parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--event-log {file}: this user may not write into {folder}, where an earlier log is renamed")
