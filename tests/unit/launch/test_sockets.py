"""The listening socket and the run directory."""

import os
import socket
from pathlib import Path

import pytest

from ipc.control import StartError
from launch.listen import address_of, open_listener, reachable
from launch.run_dir import RunDirectory


def test_port_zero_is_a_free_port_that_accepts() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_a_port_in_use_names_the_flag() -> None:
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--port {port}: already in use on 127\.0\.0\.1.*--port 0"):
            open_listener("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "256.0.0.1", "a" * 300])
def test_a_wrong_host_names_the_flag(host: str) -> None:
    with pytest.raises(StartError, match=r"^--host"):
        open_listener(host, 0)


def test_an_address_that_is_not_ours_names_the_flag() -> None:
    with pytest.raises(StartError, match=r"^--host 203\.0\.113\.1: cannot listen there"):
        open_listener("203.0.113.1", 0)  # TEST-NET-3, RFC 5737


@pytest.mark.parametrize(
    ("address", "to_try"),
    [
        ("http://0.0.0.0:80", "http://127.0.0.1:80"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.0:80", "http://10.0.0.0:80"),
    ],
)
def test_an_address_that_means_everywhere_is_tried_on_loopback(address: str, to_try: str) -> None:
    assert reachable(address) == to_try


def test_the_run_directory_is_private_and_goes_away(tmp_path: Path) -> None:
    with RunDirectory(2, {"XDG_RUNTIME_DIR": str(tmp_path)}, frontends=3) as directory:
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        file = directory.write_private("spec.json", b"{}")
        assert file.stat().st_mode & 0o777 == 0o600
        endpoints = directory.endpoints
        addresses = [*endpoints.clients, endpoints.scheduler, endpoints.workers, endpoints.stats]
        assert len(endpoints.traces) == 1 + 2 + 3
        addresses += endpoints.traces.values()
        assert len(set(addresses)) == 5 + 6
        assert all(address.startswith(f"ipc://{directory.path}/") for address in addresses)
        directory.write_private("spec.json", b"[]")
        assert file.read_bytes() == b"[]"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_stays_and_one_whose_launcher_is_gone_is_removed(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    abandoned = tmp_path / "tokenmill-gone"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    foreign = tmp_path / "tokenmill-notes"
    foreign.mkdir()
    with RunDirectory(1, environ) as first, RunDirectory(1, environ) as second:
        assert first.path.exists()
        assert second.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"tokenmill-notes"}


def test_a_path_too_long_for_sockets_falls_back_to_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    short = Path("/tmp")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(short))
    with RunDirectory(1, {"XDG_RUNTIME_DIR": str(long)}) as directory:
        assert directory.path.parent == short
        longest = max(len(os.fsencode(address.removeprefix("ipc://"))) for address in directory.endpoints.clients)
        assert longest <= 107
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    with pytest.raises(StartError, match=r"at most 107 work.*TMPDIR"):
        RunDirectory(1, {"XDG_RUNTIME_DIR": str(long)})
    assert list(long.iterdir()) == []


def test_a_runtime_directory_that_does_not_exist_is_passed_over(tmp_path: Path) -> None:
    with RunDirectory(1, {"XDG_RUNTIME_DIR": str(tmp_path / "none")}) as directory:
        assert directory.path.exists()
