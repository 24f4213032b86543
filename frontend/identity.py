"""What metrics say of this server, from its settings."""

from collections.abc import Sequence

from config.api_keys import ApiKey
from config.schema import ChildSpec

from .metrics import Identity


def identity_of(spec: ChildSpec, keys: Sequence[ApiKey]) -> Identity:
    """`keys`: those that open the API."""
    scheduler, worker = spec.config.scheduler, spec.config.worker
    on_gpu = worker.device == "cuda"
    return Identity(
        process=f"frontend-{spec.index}",
        prefix=spec.config.server.metrics_prefix,
        model_name=spec.served_names[0],
        max_model_len=spec.config.model.max_model_len or spec.arch.max_position,
        measures=spec.config.supervisor.measure,
        keys=tuple(dict.fromkeys(key.tenant for key in keys)),
        cache_config={
            "block_size": str(scheduler.block_size),
            "cache_dtype": spec.config.model.kv_dtype,
            "enable_prefix_caching": str(scheduler.prefix_cache),
            "gpu_memory_utilization": str(worker.gpu_memory_share) if on_gpu else "None",
            "kv_cache_size_tokens": str(spec.num_blocks * scheduler.block_size),
            "num_gpu_blocks": str(spec.num_blocks),
            "num_cpu_blocks": str(spec.num_host_blocks),
        },
    )
