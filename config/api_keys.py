"""API keys: digests in a file, or plain keys in the environment, never on a command line.

A line of the file is `sha256:HEX`, then optionally a name; `python -m launch.keys` makes one. Keys of one name are one
tenant, so that a key can be replaced without its user losing cached prefixes and fair share. Several keys are live at
once, whichever way they came in.
"""

import hashlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from config.sources import API_KEYS_VARIABLE, ConfigError

SHORT_KEY = 16  # characters; a shorter one can be guessed
MAX_KEY = 512  # characters
NAME_PATTERN = r"[A-Za-z0-9._-]{1,64}"
_TENANT_DIGITS = 16
_LINE = re.compile(rf"sha256:([0-9a-fA-F]{{64}})(?:[ \t]+({NAME_PATTERN}))?")
_KEY = re.compile(rf"[\x21-\x2b\x2d-\x7e]{{1,{MAX_KEY}}}")
_EXPECTED = (
    "expected sha256: and 64 hexadecimal digits, then optionally a name of at most 64 letters, digits, dots, dashes "
    "and underscores (python -m launch.keys makes such a line)"
)


class ApiKey(Struct, frozen=True):
    """One key that opens the API: the SHA-256 digest of its bytes, and whose it is."""

    digest: bytes
    tenant: str


class ApiKeys(Struct, frozen=True):
    """All keys, and what the operator should know about them. Without any, nobody is asked for one."""

    keys: tuple[ApiKey, ...] = ()
    warnings: tuple[str, ...] = ()


def read_api_keys(file: str, environ: Mapping[str, str]) -> ApiKeys:
    """Keys of `file` ("": none) and of the environment; ConfigError says what is wrong where, and shows no key."""
    keys: list[ApiKey] = []
    warnings: list[str] = []
    if file:
        keys += _from_file(Path(file), warnings)
    if API_KEYS_VARIABLE in environ:
        keys += _from_text(environ[API_KEYS_VARIABLE], warnings)
    return ApiKeys(tuple(keys), tuple(warnings))


def is_api_key(text: str) -> bool:
    """Whether `text` can be a key: 1 to 512 printable ASCII characters without space and comma."""
    return _KEY.fullmatch(text) is not None


def key_line(key: str, name: str) -> str:
    """The line of a key file for `key`."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {name}".rstrip()


def _from_file(path: Path, warnings: list[str]) -> list[ApiKey]:
    where = f"--api-key-file {path}"
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_IMODE(path.stat().st_mode) & stat.S_IROTH:
                warnings.append(f"{where}: everybody on this machine can read it (chmod 600 {path} changes that)")
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not a text file; {_EXPECTED} in each line") from None
    keys = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{where}, line {number}: {_EXPECTED}")  # without the line, which may hold a plain key
        digest = bytes.fromhex(match[1])
        keys.append(ApiKey(digest, match[2] or tenant_of_digest(digest)))
    if not keys:
        raise ConfigError(f"{where}: holds no key; {_EXPECTED} in each line")
    return keys


def _from_text(text: str, warnings: list[str]) -> list[ApiKey]:
    plain = [part.strip() for part in text.split(",")]
    if not all(map(is_api_key, plain)):
        raise ConfigError(
            f"{API_KEYS_VARIABLE}: expected keys of 1 to {MAX_KEY} printable ASCII characters without spaces, "
            "separated by commas"
        )
    if any(len(key) < SHORT_KEY for key in plain):
        warnings.append(f"{API_KEYS_VARIABLE}: a key of less than {SHORT_KEY} characters can be guessed")
    digests = [hashlib.sha256(key.encode()).digest() for key in plain]
    return [ApiKey(digest, tenant_of_digest(digest)) for digest in digests]


def tenant_of_digest(digest: bytes) -> str:
    """The tenant that a key without a name stands for."""
    return digest.hex()[:_TENANT_DIGITS]
