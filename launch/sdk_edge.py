"""Where clients of the SDK connect besides this run's own directory, looked at before anything slow begins."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from config.schema import SdkConfig
from config.sdk_listen import SdkListen, parse_sdk_listen
from config.sources import ConfigError
from ipc.key_files import read_allowed_keys, read_key_file
from launch.listen import free_loopback_port

T = TypeVar("T")
_MAX_SOCKET_PATH = 107  # bytes; sockaddr_un holds 108 with the closing zero (unix(7))


def check_sdk(sdk: SdkConfig, tokenizers: int) -> list[str]:
    """Warnings for the operator; ConfigError for an address or a file that cannot be used."""
    if bool(sdk.sdk_keys) != bool(sdk.sdk_server_key):
        given, missing = ("--sdk-keys", "--sdk-server-key") if sdk.sdk_keys else ("--sdk-server-key", "--sdk-keys")
        raise ConfigError(f"{given} needs {missing} as well (python -m ipc keygen --help says how they are made)")
    if not sdk.sdk_listen:
        if sdk.sdk_keys:
            raise ConfigError("--sdk-keys needs --sdk-listen tcp://HOST:PORT as well")
        return []
    listen = parse_sdk_listen(sdk.sdk_listen)
    warnings = []
    if sdk.sdk_keys:
        if listen.path:
            raise ConfigError("--sdk-keys: only with --sdk-listen tcp://...: an ipc:// socket is for this user alone")
        _said("--sdk-keys", read_allowed_keys, sdk.sdk_keys)
        _said("--sdk-server-key", read_key_file, sdk.sdk_server_key)
        if stat.S_IMODE(Path(sdk.sdk_server_key).stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
            warnings.append(
                f"--sdk-server-key {sdk.sdk_server_key}: others on this machine can read it "
                f"(chmod 600 {sdk.sdk_server_key} changes that)"
            )
    elif not listen.loopback:
        raise ConfigError(
            f"--sdk-listen {sdk.sdk_listen}: without keys only on loopback; --sdk-keys and --sdk-server-key encrypt "
            "it and say who may connect"
        )
    elif not listen.path:
        warnings.append(
            f"--sdk-listen {sdk.sdk_listen} without keys: every user of this machine can use the model "
            "(--sdk-keys says who may)"
        )
    if listen.port == 0 and not listen.path and tokenizers > 1:
        raise ConfigError(f"--sdk-listen {sdk.sdk_listen}: port 0 is for one tokenizer process, not {tokenizers}")
    for index in range(tokenizers):
        (_check_path if listen.path else _check_port)(listen, index)
    return warnings


def settle_sdk(sdk: SdkConfig) -> SdkConfig:
    """With a free port in the place of port 0: it stays the same when the tokenizer process is replaced."""
    if not sdk.sdk_listen:
        return sdk
    listen = parse_sdk_listen(sdk.sdk_listen)
    if listen.path or listen.port:
        return sdk
    settled = msgspec.structs.replace(listen, port=free_loopback_port())
    return msgspec.structs.replace(sdk, sdk_listen=settled.address(0))


def addresses(sdk: SdkConfig, tokenizers: int) -> list[str]:
    """All that clients can connect to; none without --sdk-listen."""
    return [parse_sdk_listen(sdk.sdk_listen).address(index) for index in range(tokenizers)] if sdk.sdk_listen else []


def _said(flag: str, read: Callable[[str], T], file: str) -> T:
    try:
        return read(file)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None


def _check_path(listen: SdkListen, index: int) -> None:
    address = listen.address(index)
    path = Path(address.removeprefix("ipc://"))
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"--sdk-listen {address}: the path of a socket has at most {_MAX_SOCKET_PATH} bytes")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--sdk-listen {address}: {path.parent} is no directory in which this user can make a socket")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"--sdk-listen {address}: there is a file of that name, which is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"--sdk-listen {address}: another process listens there")


def _check_port(listen: SdkListen, index: int) -> None:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if listen.host == "*" else listen.host, listen.port + index if listen.port else 0))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "a port is at most 65535"
            raise ConfigError(f"--sdk-listen {listen.address(index)}: {reason}") from None
