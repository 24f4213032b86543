"""Files that will be written later, looked at before anything slow begins."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from config.sources import ConfigError


def check_apart(files: Mapping[str, str | Path | None]) -> None:
    """ConfigError when two of them are the same file, of which one would be lost. `files`: by flag; None: not given."""
    seen: dict[str, str] = {}
    for flag, file in files.items():
        if file is None:
            continue
        # Devices may be written to any number of times.
        path = os.path.realpath(file)
        if os.path.exists(path) and not os.path.isfile(path):
            continue
        if path in seen:
            raise ConfigError(f"{flag} {file}: the same file as that of {seen[path]}")
        seen[path] = flag


def check_output(flag: str, file: str | Path) -> None:
    """ConfigError naming `flag` when `file` cannot be written as things are; nothing is created or changed."""
    path = Path(file)
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not folder.is_dir():
            missing = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{flag} {file}: the folder {folder} {missing}")
        # With access(2), so that read-only file systems and rights beyond the mode bits count.
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{flag} {file}: this user may not write there")
        os.lstat(path)  # a name that is too long
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from None
    except ValueError as error:  # a zero byte
        raise ConfigError(f"{flag} {str(file)!r}: {error}") from None
