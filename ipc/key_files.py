"""Files of CURVE keys for links over TCP.

A key pair lies in a file that only its owner can read, as two lines `public Z85` and `secret Z85`; the server's list of
clients has a line `curve:Z85 name` for each, and the name is the tenant. `python -m ipc keygen` makes both
(`python -m tokenmill_client keygen`, where the wheel is installed).
"""

import os
import re
import struct
from pathlib import Path

from msgspec import Struct
from zmq.utils import z85

NAME_PATTERN = r"[A-Za-z0-9._-]{1,64}"
_Z85 = r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
_KEY_FILE = re.compile(rf"public ({_Z85})\nsecret ({_Z85})\n?")
_LINE = re.compile(rf"curve:({_Z85})[ \t]+({NAME_PATTERN})")
_EXPECTED = (
    "expected curve:, the client's public key of 40 characters, a space, and a name of at most 64 letters, digits, "
    "dots, dashes and underscores (the client's keygen prints such a line)"
)


class KeyPair(Struct, frozen=True):
    """Both keys in Z85, 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"  # the secret has no place in logs


def check_server_key(key: str) -> bytes:
    """The key in Z85; ValueError when it is none."""
    if re.fullmatch(_Z85, key) is None or not _is_key(key):
        raise ValueError("a public key has 40 characters: the server's operator has it from keygen")
    return key.encode()


def _is_key(text: str) -> bool:
    """Whether these characters of Z85 stand for bytes: five can be more than 32 bits."""
    try:
        z85.decode(text.encode())
    except struct.error:
        return False
    return True


def key_line(public: bytes, name: str) -> str:
    """The line of a server's list for a client's public key."""
    return f"curve:{public.decode()} {name}"


def write_key_file(path: Path, keys: KeyPair) -> None:
    """Into a new file that only this user can read; OSError, also when there is a file of that name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"public %s\nsecret %s\n" % (keys.public, keys.secret))


def read_key_file(path: str | Path) -> KeyPair:
    """The key pair of a file; ValueError, in a line that names the file, when it cannot be had."""
    text = _read(path)
    match = _KEY_FILE.fullmatch(text)
    if match is None or not (_is_key(match[1]) and _is_key(match[2])):
        raise ValueError(f"{path}: holds no key pair (keygen makes one)")
    return KeyPair(match[1].encode(), match[2].encode())


def read_allowed_keys(path: str | Path) -> dict[bytes, str]:
    """Names by public key; ValueError, in a line that names the place, when it cannot be had."""
    allowed: dict[bytes, str] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not _is_key(match[1]):
            raise ValueError(f"{path}, line {number}: {_EXPECTED}")
        key = match[1].encode()
        if allowed.setdefault(key, match[2]) != match[2]:
            raise ValueError(f"{path}, line {number}: this key has another name in a line before")
    if not allowed:
        raise ValueError(f"{path}: holds no key; {_EXPECTED} in each line")
    return allowed


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("ascii")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file of keys") from None
