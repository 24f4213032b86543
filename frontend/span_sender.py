"""Spans on their way to an OpenTelemetry collector (OTLP over HTTP); the extra `otel` has what is imported here.

One call a request, at its end. The library sends from a bounded buffer, on a thread of its own; what a collector does
not take is dropped. Which requests are sampled is for the caller's `traceparent` to say, else for OTEL_TRACES_SAMPLER.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from config.otlp import traces_url

from .request_spans import SpanData

_CLOSE_SECONDS = 2.0


class SpanSender:
    """Sends spans to a collector."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """`endpoint`: as `--otlp-endpoint` has it; `instance`: which process of the server this is.

        ConfigError when nothing can be sent there.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "tokenmill", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("tokenmill")
        propagator: Any = TraceContextTextMapPropagator()
        self._extract = propagator.extract
        self._set_span = set_span_in_context
        self._kinds = SpanKind
        self._failure: Callable[[str], Any] = lambda text: Status(StatusCode.ERROR, text)

    def send(self, span: SpanData, headers: Mapping[str, str]) -> None:
        """Send a request's span and those below it, as part of the trace that its `headers` name, if they name one."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._send(span, self._extract(carrier), self._kinds.SERVER)

    def _send(self, span: SpanData, context: Any, kind: Any) -> None:
        made = self._tracer.start_span(
            span.name, context, kind=kind, attributes=dict(span.attributes), start_time=span.start
        )
        if span.error:
            made.set_status(self._failure(span.error))
        if span.children and made.is_recording():
            below = self._set_span(made, context)
            for child in span.children:
                self._send(child, below, self._kinds.INTERNAL)
        made.end(span.end)

    async def close(self) -> None:
        """Send what is left, for a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.to_thread(self._provider.shutdown)
