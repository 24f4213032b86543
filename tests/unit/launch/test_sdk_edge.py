"""Addresses and keys of SDK clients, looked at before the engine starts."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.schema import SdkConfig
from config.sdk_listen import SdkListen, parse_sdk_listen
from config.sources import ConfigError
from ipc.key_files import key_line
from launch.listen import free_loopback_port
from launch.sdk_edge import addresses, check_sdk, settle_sdk
from tests.key_files import make_key_file


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tm-") as name:  # the path of a socket must be short
        yield Path(name)


@pytest.fixture
def keys(folder: Path) -> dict[str, str]:
    make_key_file(folder / "server.key")
    client = make_key_file(folder / "client.key")
    (folder / "clients.txt").write_text(key_line(client.public, "team"))
    return {"sdk_keys": str(folder / "clients.txt"), "sdk_server_key": str(folder / "server.key")}


@pytest.mark.parametrize(
    ("text", "second", "loopback"),
    [
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001", True),
        ("tcp://localhost:7000", "tcp://127.0.0.1:7001", True),
        ("tcp://[::1]:7000", "tcp://[::1]:7001", True),
        ("tcp://0.0.0.0:7000", "tcp://0.0.0.0:7001", False),
        ("tcp://*:7000", "tcp://*:7001", False),
        ("tcp://10.1.2.3:7000", "tcp://10.1.2.3:7001", False),
        ("ipc:///run/a.sock", "ipc:///run/a.sock-1", True),
    ],
)
def test_addresses(text: str, second: str, loopback: bool) -> None:
    listen = parse_sdk_listen(text)
    assert listen.address(0) == text.replace("localhost", "127.0.0.1")
    assert (listen.address(1), listen.loopback) == (second, loopback)
    assert addresses(SdkConfig(sdk_listen=text), 2) == [listen.address(0), second]


@pytest.mark.parametrize(
    "text", ["7000", "tcp://7000", "tcp://host:7000", "tcp://127.0.0.1", "ipc://a", "ipc:///", "http://127.0.0.1:7000"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--sdk-listen .*: expected tcp://HOST:PORT, .* or ipc:///PATH"):
        parse_sdk_listen(text)


def test_a_port_is_at_most_65535() -> None:
    with pytest.raises(ConfigError, match="at most 65535"):
        parse_sdk_listen("tcp://127.0.0.1:65536")
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:65536: a port is at most 65535"):
        check_sdk(SdkConfig(sdk_listen="tcp://127.0.0.1:65535"), 2)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.1"])
def test_tcp_for_others_needs_keys(host: str, keys: dict[str, str]) -> None:
    address = f"tcp://{host}:0"
    with pytest.raises(ConfigError, match="without keys only on loopback"):
        check_sdk(SdkConfig(sdk_listen=address), 1)
    if host != "192.0.2.1":  # which is no address of this machine
        assert check_sdk(SdkConfig(sdk_listen=address, **keys), 1) == []


def test_nothing_is_said_of_nothing(keys: dict[str, str]) -> None:
    assert check_sdk(SdkConfig(), 1) == []
    assert settle_sdk(SdkConfig()) == SdkConfig()
    assert addresses(SdkConfig(), 1) == []
    with pytest.raises(ConfigError, match="--sdk-keys needs --sdk-listen"):
        check_sdk(SdkConfig(**keys), 1)


def test_loopback_without_keys_is_a_warning() -> None:
    (warning,) = check_sdk(SdkConfig(sdk_listen="tcp://127.0.0.1:0"), 1)
    assert "every user of this machine" in warning


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sdk_server_key": ""}, "--sdk-keys needs --sdk-server-key as well"),
        ({"sdk_keys": ""}, "--sdk-server-key needs --sdk-keys as well"),
        ({"sdk_keys": "none"}, "--sdk-keys none: No such file"),
        ({"sdk_server_key": "none"}, "--sdk-server-key none: No such file"),
        ({"sdk_server_key": "SWAP"}, "--sdk-server-key .*clients.txt: holds no key pair"),
        ({"sdk_listen": "ipc:///tmp/x"}, "--sdk-keys: only with --sdk-listen tcp"),
    ],
    ids=str,
)
def test_files_that_cannot_be_used(keys: dict[str, str], change: dict[str, str], said: str) -> None:
    settings: dict[str, Any] = {"sdk_listen": "tcp://127.0.0.1:0", **keys, **change}
    if settings["sdk_server_key"] == "SWAP":
        settings["sdk_server_key"] = settings["sdk_keys"]
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_sdk(SdkConfig(**settings), 1)


def test_a_key_that_others_can_read_is_a_warning(keys: dict[str, str]) -> None:
    Path(keys["sdk_server_key"]).chmod(0o640)
    (warning,) = check_sdk(SdkConfig(sdk_listen="tcp://127.0.0.1:0", **keys), 1)
    assert "chmod 600" in warning


def test_a_port_that_is_taken(keys: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--sdk-listen tcp://127\.0\.0\.1:{port}: Address already in use"):
            check_sdk(SdkConfig(sdk_listen=f"tcp://127.0.0.1:{port}", **keys), 1)


def test_port_0_is_settled_once() -> None:
    settled = settle_sdk(SdkConfig(sdk_listen="tcp://127.0.0.1:0"))
    assert parse_sdk_listen(settled.sdk_listen) == SdkListen(
        host="127.0.0.1", port=parse_sdk_listen(settled.sdk_listen).port
    )
    assert parse_sdk_listen(settled.sdk_listen).port > 0
    assert settle_sdk(settled) == settled
    with pytest.raises(ConfigError, match="port 0 is for one tokenizer process, not 2"):
        check_sdk(SdkConfig(sdk_listen="tcp://127.0.0.1:0"), 2)
    fixed = SdkConfig(sdk_listen=f"tcp://127.0.0.1:{free_loopback_port()}")
    assert settle_sdk(fixed) == fixed


def test_sockets_on_this_machine(folder: Path) -> None:
    free, file, stale, live = (folder / name for name in ("free", "file", "stale", "live"))
    file.write_text("precious")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    for path in (free, stale):
        assert check_sdk(SdkConfig(sdk_listen=f"ipc://{path}"), 1) == []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(live))
        listening.listen()
        for path, said in (
            (file, "which is no socket"),
            (live, "another process listens there"),
            (folder / "none" / "a", "no directory in which"),
            (folder / ("x" * 108), "at most 107 bytes"),
        ):
            with pytest.raises(ConfigError, match=said):
                check_sdk(SdkConfig(sdk_listen=f"ipc://{path}"), 1)
    assert file.read_text() == "precious"
