"""Where traces go, and what is said when they cannot be sent."""

import sys

import pytest

from config import otlp
from config.otlp import traces_url
from config.sources import ConfigError


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_MODULES", ("json.decoder",))


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector.example.org/", "https://collector.example.org/v1/traces"),
        ("http://10.0.0.1:4318/otlp/v1/traces", "http://10.0.0.1:4318/otlp/v1/traces"),
    ],
)
def test_a_collector_takes_traces_at_the_path_of_the_protocol(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a:99999", "http://[::"]
)
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^--otlp-endpoint .*: must be a URL, such as http://localhost:4318$"):
        traces_url(endpoint)


@pytest.mark.parametrize("missing", ["no_such_package.trace", "json.no_such_module"])
def test_a_missing_extra_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(otlp, "_MODULES", ("json.decoder", missing))
    with pytest.raises(ConfigError, match="extra otel: install opentelemetry-sdk and opentelemetry-exporter"):
        traces_url("http://localhost:4318")


def test_looking_for_it_loads_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_MODULES", ("wsgiref.simple_server",))
    monkeypatch.delitem(sys.modules, "wsgiref.simple_server", raising=False)
    traces_url("http://localhost:4318")
    assert "wsgiref.simple_server" not in sys.modules
