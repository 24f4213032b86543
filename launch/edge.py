"""Keys, origins, certificates and where traces go, looked at before anything slow begins.

The frontends read them themselves.
"""

import ipaddress
import re
from collections.abc import Mapping

from config.api_keys import read_api_keys
from config.otlp import traces_url
from config.schema import ServerConfig
from config.sources import ConfigError
from config.tls import server_context

_ORIGIN = re.compile(r"https?://[^/\s?#@,]+|null", re.IGNORECASE)


def check_edge(server: ServerConfig, environ: Mapping[str, str]) -> list[str]:
    """Warnings for the operator; ConfigError for a file, an origin or a variable that cannot be used."""
    api_keys = read_api_keys(server.api_key_file, environ)
    server_context(server.tls_cert, server.tls_key)
    for origin in server.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {origin}: must be * or scheme, host and port without a path, "
                "such as https://chat.example.org"
            )
    if server.otlp_endpoint:
        traces_url(server.otlp_endpoint)
    warnings = list(api_keys.warnings)
    if server.frontends and not api_keys.keys and not _is_loopback(server.host):
        warnings.append(
            f"--host {server.host} without API keys: whoever reaches this port can use the model "
            "(--api-key-file asks for keys)"
        )
    return warnings


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
