"""Addresses of servers, as callers of the SDK give them."""

import re
from collections.abc import Sequence

# Hosts as libzmq takes them: none that begins with a sign, such as a listener's `*`.
_TCP = re.compile(
    r"tcp://(?:\[[0-9A-Fa-f][0-9A-Za-z:.%_-]*\]|\[::[0-9A-Za-z:.%_-]*\]|[0-9A-Za-z][0-9A-Za-z._-]*):([0-9]{1,5})"
)
_MAX_PATH = 107  # bytes that the address of a Unix socket holds


def check_addresses(given: str | Sequence[str]) -> list[str]:
    """The addresses, at least one; ValueError for what cannot be one."""
    addresses = [given] if isinstance(given, str) else given
    if not isinstance(addresses, list | tuple) or not addresses:
        raise ValueError(f"address: expected a text or a list of texts, with at least one, not {given!r}")
    for address in addresses:
        if not isinstance(address, str) or not (_is_path(address) or _is_port(address)):
            raise ValueError(f"address {address!r}: expected ipc://PATH or tcp://HOST:PORT")
    return list(addresses)


def _is_path(address: str) -> bool:
    if not address.startswith("ipc://"):
        return False
    try:
        path = address.removeprefix("ipc://").encode()
    except UnicodeEncodeError:
        return False
    if len(path) > _MAX_PATH:
        raise ValueError(f"address {address!r}: the path of a socket may have at most {_MAX_PATH} bytes")
    return bool(path) and b"\0" not in path


def _is_port(address: str) -> bool:
    match = _TCP.fullmatch(address)
    return match is not None and 1 <= int(match[1]) <= 65535
