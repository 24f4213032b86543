"""What is said of certificates, origins and open ports before the engine starts."""

import re
from pathlib import Path

import pytest

from config.schema import ServerConfig
from config.sources import ConfigError
from config.tls import server_context
from launch.edge import check_edge

TLS = Path(__file__).resolve().parents[2] / "processes" / "frontend" / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")


def test_no_tls_is_no_context() -> None:
    assert server_context("", "") is None
    assert server_context(CERT, KEY) is not None


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        (CERT, "", "--tls-cert needs --tls-key as well"),
        ("", KEY, "--tls-key needs --tls-cert as well"),
        (str(TLS / "none"), KEY, r"--tls-cert .*none: No such file or directory"),
        (CERT, str(TLS), r"--tls-key .*tls: Is a directory"),
        (KEY, KEY, r"--tls-cert .*key\.pem: holds no certificate in PEM form \(-----BEGIN CERTIFICATE-----\)"),
        (CERT, CERT, r"--tls-key .*cert\.pem: holds no private key in PEM form"),
        (CERT, str(TLS / "other-key.pem"), r"--tls-key .*other-key\.pem: does not belong to the certificate in .*cert"),
        (CERT, str(TLS / "encrypted-key.pem"), r"--tls-key .*encrypted-key\.pem: is encrypted"),
    ],
)
def test_files_that_cannot_be_used(cert: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        server_context(cert, key)


def test_a_damaged_certificate(tmp_path: Path) -> None:
    damaged = tmp_path / "cert.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=rf"^--tls-cert {re.escape(str(damaged))}, --tls-key .*: cannot be used"):
        server_context(str(damaged), KEY)


@pytest.mark.parametrize("origin", ["https://a.example", "http://localhost:3000", "*", "null"])
def test_origins(origin: str) -> None:
    assert check_edge(ServerConfig(cors_origin=(origin,)), {}) == []


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "ftp://a", "https://", "**"])
def test_origins_that_are_none(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^--cors-origin .*: must be \*"):
        check_edge(ServerConfig(cors_origin=(origin,)), {})


@pytest.mark.parametrize(
    ("host", "frontends", "keys", "warned"),
    [
        ("127.0.0.1", 1, "", False),
        ("::1", 1, "", False),
        ("localhost", 1, "", False),
        ("0.0.0.0", 1, "", True),
        ("0.0.0.0", 0, "", False),
        ("0.0.0.0", 1, "a-key-that-nobody-guesses", False),
    ],
)
def test_a_port_that_is_open_to_all_is_warned_of(host: str, frontends: int, keys: str, warned: bool) -> None:
    environ = {"TOKENMILL_API_KEYS": keys} if keys else {}
    warnings = check_edge(ServerConfig(host=host, frontends=frontends), environ)
    assert ["without API keys" in warning for warning in warnings] == [True] * warned
