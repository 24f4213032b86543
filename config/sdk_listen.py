"""The addresses of `--sdk-listen`."""

import ipaddress
import re

from msgspec import Struct

from config.sources import ConfigError

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^:\[\]/]+):(\d{1,5})")
_EXPECTED = "expected tcp://HOST:PORT, with an IP address or * as the host, or ipc:///PATH/OF/A/SOCKET"


class SdkListen(Struct, frozen=True):
    """Where clients connect: a TCP port or, with a `path`, a socket on this machine."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def loopback(self) -> bool:
        return bool(self.path) or (self.host != "*" and ipaddress.ip_address(self.host).is_loopback)

    def address(self, index: int) -> str:
        """Of the tokenizer process `index`: the next ports, or the next sockets, belong to the next ones."""
        if self.path:
            return f"ipc://{self.path}-{index}" if index else f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port + index}"


def parse_sdk_listen(text: str) -> SdkListen:
    """ConfigError, in a line, for what is no such address."""
    if text.startswith("ipc:///") and not text.endswith("/"):
        return SdkListen(path=text.removeprefix("ipc://"))
    match = _TCP.fullmatch(text)
    if match is None:
        raise ConfigError(f"--sdk-listen {text}: {_EXPECTED}")
    host = "127.0.0.1" if match[1] == "localhost" else match[1].strip("[]")
    try:
        if host != "*":
            ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--sdk-listen {text}: {_EXPECTED}") from None
    if int(match[2]) > 65535:
        raise ConfigError(f"--sdk-listen {text}: a port is at most 65535")
    return SdkListen(host=host, port=int(match[2]))
