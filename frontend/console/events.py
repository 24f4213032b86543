"""GET /console/events: the console's numbers as server-sent events."""

import msgspec
from aiohttp import web
from msgspec import Struct

from config.schema import ChildSpec
from ipc.stats_messages import CachedPrefix, EngineDetails, LiveRequest

from ..service import Service
from ..streaming import ClientGone, EventStream
from .sampling import PERIOD, Sample, Sampler

_TENANT_DIGITS = 8  # enough to tell tenants apart; the whole digest of a key is nobody's business


class Engine(Struct, frozen=True):
    """What does not change while this process runs. Event `engine`, the first."""

    model: str
    names: tuple[str, ...]
    parameters: int
    context_length: int | None  # tokens
    device: str
    ranks: int
    threads: int | None  # of each rank
    dtype: str
    kv_dtype: str
    quantization: str
    kernels: str
    policy: str
    max_seqs: int | None
    max_step_tokens: int | None
    block_size: int  # tokens
    kv_bytes: int  # of each rank
    period: float  # seconds between two samples


class RequestRow(Struct, frozen=True):
    id: str
    tenant: str | None
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    age_seconds: float
    preemptions: int


class PrefixRow(Struct, frozen=True):
    digest: str
    tenant: str | None
    tokens: int
    blocks: int
    end: int
    tier: str
    children: int
    users: int
    uses: int
    idle_seconds: float


class Snapshot(Struct, frozen=True):
    """Event `snapshot`, once a second."""

    sample: Sample
    requests: list[RequestRow]
    prefixes: list[PrefixRow]
    prefix_nodes: int


class Events:
    """The endpoint. Its events: `engine`, `history` (a list of samples), then `snapshot` again and again."""

    def __init__(self, spec: ChildSpec, service: Service, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._block_size = spec.config.scheduler.block_size
        self._engine = _engine_of(spec)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /console/events"""
        stream = EventStream(request, keep_alive=b"")  # it is never silent for long
        with self._sampler.watching() as samples:
            try:
                stream.send(_event("engine", self._engine) + _event("history", list(self._sampler.history)))
                while (sample := await samples.get()) is not None:
                    stream.send(_event("snapshot", self._snapshot(sample)))
                await stream.finish()
            except ClientGone:
                pass
            finally:
                stream.close()
        stream.response.force_close()
        return stream.response

    def _snapshot(self, sample: Sample) -> Snapshot:
        details = self._service.details or EngineDetails(0.0, (), (), 0)
        return Snapshot(
            sample,
            [_request_row(request) for request in details.requests],
            [_prefix_row(prefix, self._block_size) for prefix in details.prefixes],
            details.prefix_nodes,
        )


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def _tenant(name: str) -> str | None:
    return name[:_TENANT_DIGITS] or None


def _request_row(request: LiveRequest) -> RequestRow:
    return RequestRow(
        request.id,
        _tenant(request.tenant),
        request.state,
        request.prompt_tokens,
        request.cached_tokens,
        request.computed_tokens,
        request.generated_tokens,
        round(request.age_seconds, 2),
        request.preemptions,
    )


def _prefix_row(prefix: CachedPrefix, block_size: int) -> PrefixRow:
    return PrefixRow(
        prefix.digest,
        _tenant(prefix.namespace.partition(":")[0]),
        prefix.blocks * block_size,
        prefix.blocks,
        prefix.end,
        "host" if prefix.on_host else "device",
        prefix.children,
        prefix.users,
        prefix.uses,
        round(prefix.idle_seconds, 1),
    )


def _engine_of(spec: ChildSpec) -> Engine:
    config = spec.config
    return Engine(
        spec.served_names[0],
        spec.served_names,
        spec.arch.num_parameters,
        config.model.max_model_len,
        config.worker.device,
        config.worker.tp,
        config.worker.threads,
        config.model.dtype,
        config.model.kv_dtype,
        config.model.quantization,
        config.worker.kernels,
        config.scheduler.policy,
        config.scheduler.max_seqs,
        config.scheduler.max_step_tokens,
        config.scheduler.block_size,
        spec.kv_memory_bytes,
        PERIOD,
    )
