"""Where OpenTelemetry traces go (`--otlp-endpoint`), and whether they can be sent."""

from importlib.util import find_spec
from urllib.parse import urlsplit

from config.sources import ConfigError

_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_TRACES_PATH = "/v1/traces"  # where collectors take them over HTTP


def traces_url(endpoint: str) -> str:
    """The URL that traces are posted to; ConfigError when `endpoint` is none, or when the extra `otel` is missing."""
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # of the port
        usable = False
    if not usable:
        raise ConfigError(f"--otlp-endpoint {endpoint}: must be a URL, such as http://localhost:4318")
    if not all(map(_is_there, _MODULES)):
        raise ConfigError(
            "--otlp-endpoint needs the extra otel: install opentelemetry-sdk and "
            "opentelemetry-exporter-otlp-proto-http into the server's environment"
        )
    return endpoint if url.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
