"""A frontend process without the rest of an engine, as the benchmark and the tests start it."""

from config.schema import ChildSpec, Config, Endpoints, ModelArch, ServerConfig
from ipc.messages import ModelInfo


def frontend_spec(
    model: ModelInfo, clients: str, stats: str, run_dir: str, listen_fd: int, server: ServerConfig
) -> ChildSpec:
    """Before an engine at the endpoint `clients` that says it serves `model`, whose sizes matter to nobody."""
    return ChildSpec(
        role="frontend",
        index=0,
        config=Config(server=server),
        arch=ModelArch(
            family="llama",
            hidden_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=8,
            vocab_size=model.vocab_size,
            max_position=model.max_model_len,
        ),
        model_path="",
        served_names=model.names,
        endpoints=Endpoints(clients=(clients,), scheduler="", workers="", stats=stats),
        run_dir=run_dir,
        incarnation=1,
        kv_memory_bytes=0,
        num_blocks=0,
        listen_fd=listen_fd,
    )
