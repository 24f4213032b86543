"""The server's TLS certificate and key."""

import ssl
from pathlib import Path

from config.sources import ConfigError


def server_context(cert: str, key: str) -> ssl.SSLContext | None:
    """A context for TLS 1.2 and later with this certificate chain and private key, both PEM files; None without TLS.

    ConfigError says which of the two files is wrong, and how.
    """
    if not cert and not key:
        return None
    if not cert or not key:
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {missing} as well")
    _check_pem("--tls-cert", cert, b"-----BEGIN CERTIFICATE-----", "certificate")
    _check_pem("--tls-key", key, b"PRIVATE KEY-----", "private key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def refuse() -> str:
        raise ConfigError(f"--tls-key {key}: is encrypted; give a key without a passphrase, readable by this user only")

    try:
        context.load_cert_chain(cert, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--tls-key {key}: does not belong to the certificate in {cert}") from None
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: cannot be used: {error.reason or error}") from None
    return context


def _check_pem(flag: str, file: str, marker: bytes, what: str) -> None:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from None
    if marker not in content:
        raise ConfigError(f"{flag} {file}: holds no {what} in PEM form ({marker.decode()})")
