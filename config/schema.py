"""Every setting of the engine, as frozen structs: one per owner, composed in `Config`, never inherited.

Flags, environment variables and the config file are generated from these fields (see `config.sources`): a field's name
is its flag (`max_seqs` -> `--max-seqs`, `TOKENMILL_MAX_SEQS`), its `Meta.description` is its help, its bounds are
checked by msgspec. `None` means "chosen at start": `config.resolve` fills it in and says why.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from config.machine import Machine

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KvDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
PolicyName = Literal["fcfs", "priority", "longest-prefix", "fair", "deadline"]
Preference = Literal["mixed", "prefill", "decode"]
Shortage = Literal["wait", "recompute", "swap"]
EvictionName = Literal["lru", "lfu", "fifo"]
ToolParserName = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["auto", "none", "think"]
PoolingName = Literal["auto", "last", "mean", "cls"]
QuantizationName = Literal["auto", "none", "int8", "int4"]
WeightFormat = Literal["float32", "float16", "bfloat16", "int8", "int4"]

PortNumber = Annotated[int, Meta(ge=0, le=65535)]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is served and in which numbers it computes."""

    model: Annotated[
        str, Meta(description="model to serve: a directory with safetensors and config.json, a .gguf file, or a hub id")
    ] = ""
    revision: Annotated[str | None, Meta(description="branch, tag or commit, when --model is a hub id")] = None
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names clients may ask for, comma-separated (default: the model's own name)")
    ] = ()
    dtype: Annotated[DType, Meta(description="number type of activations and float weights")] = "auto"
    kv_dtype: Annotated[
        KvDType,
        Meta(
            description="number type of the KV cache (auto: float16 with compiled CPU kernels, else that of --dtype): "
            "half the memory of float32, and half the reading in long contexts; int8 half of that again, and less "
            "exact; fp8 (e4m3) likewise, with GPU kernels"
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationName,
        Meta(
            description="quantized weights are multiplied as integers, as they are in the file (auto), or dequantized "
            "when they are loaded (none); with int8 or int4, float weights are rounded when they are loaded, "
            "embedding and head to int8 at least"
        ),
    ] = "auto"
    max_model_len: (
        Annotated[
            int, Meta(description="longest prompt plus output, in tokens (default: what the model declares)", ge=16)
        ]
        | None
    ) = None
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="requests that do not say are sampled as the model's generation_config.json (or GGUF file) "
            "recommends, else as OpenAI does (auto); or always as OpenAI does (none)"
        ),
    ] = "auto"
    pooling: Annotated[
        PoolingName,
        Meta(
            description="embeddings are the last token's hidden state, the mean of all tokens', or the first token's "
            "(cls); auto: as the model declares, else last"
        ),
    ] = "auto"


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[PortNumber, Meta(description="port to listen on; 0 picks a free one")] = 8000
    frontends: Annotated[
        int, Meta(description="HTTP processes sharing the port; 0: no HTTP, ZeroMQ clients only", ge=0, le=64)
    ] = 1
    max_body_bytes: Annotated[int, Meta(description="largest request body accepted, in bytes", ge=1024, le=1 << 30)] = (
        4 << 20
    )
    keepalive_seconds: Annotated[
        float, Meta(description="an SSE comment is sent on streams silent for this many seconds", ge=0.1, le=3600)
    ] = 10.0
    client_timeout: Annotated[
        float,
        Meta(
            description="seconds after which a connection is closed whose client has not sent its request, takes in "
            "nothing of its answer, or sends no further request",
            ge=1,
            le=3600,
        ),
    ] = 75.0
    api_key_file: Annotated[
        str,
        Meta(
            description="file of API keys, a line 'sha256:HEX [name]' for each (python -m launch.keys makes one); "
            "further keys come from the variable TOKENMILL_API_KEYS, comma-separated. Without keys nobody is asked "
            "for one"
        ),
    ] = ""
    cors_origin: Annotated[
        tuple[str, ...],
        Meta(description="origins whose web pages may use the API, such as https://chat.example.org, or * for all"),
    ] = ()
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate chain, for HTTPS; needs --tls-key")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key, not encrypted")] = ""
    tool_parser: Annotated[
        ToolParserName,
        Meta(
            description="how the model writes tool calls; auto: told by its chat template; none: requests have no tools"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParserName,
        Meta(
            description="how the model marks what it thinks before it answers: <think>...</think>; auto: told by its "
            "chat template; none: that is part of the text"
        ),
    ] = "auto"
    chat_template_kwargs: Annotated[
        tuple[str, ...],
        Meta(description="names that requests may pass to the chat template, comma-separated"),
    ] = ("enable_thinking", "thinking", "reasoning_effort", "date_string", "tools_in_user_message")
    console: Annotated[bool, Meta(description="serve the web console at /")] = True
    metrics_prefix: Annotated[
        str,
        Meta(
            description="what the names of metrics begin with; with vllm, dashboards made for vLLM read them",
            pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$",
        ),
    ] = "tokenmill"
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="OpenTelemetry collector that gets a trace of each request over OTLP/HTTP, such as "
            "http://localhost:4318; needs the extra otel"
        ),
    ] = ""
    timeline_requests: Annotated[
        int,
        Meta(
            description="ended requests whose timelines each HTTP process keeps, for /debug/requests; 0: none",
            ge=0,
            le=100_000,
        ),
    ] = 1000


class SdkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clients of the SDK, without HTTP. On this machine they can always connect to the address that is printed at
    start."""

    sdk_listen: Annotated[
        str,
        Meta(
            description="further address for clients of the SDK, the same in every run: ipc:///PATH or "
            "tcp://HOST:PORT (port 0 picks a free one; further tokenizer processes have PATH-1 or the next port). TCP "
            "that is not loopback needs --sdk-keys"
        ),
    ] = ""
    sdk_keys: Annotated[
        str,
        Meta(
            description="file of the clients that may connect over TCP, a line 'curve:KEY name' for each (python -m "
            "ipc keygen makes one); the name is their tenant. Connections are then encrypted"
        ),
    ] = ""
    sdk_server_key: Annotated[
        str, Meta(description="file with this server's key pair, for --sdk-keys (python -m ipc keygen makes one)")
    ] = ""
    idempotency_seconds: Annotated[
        float,
        Meta(
            description="how long the answer to a request with an idempotency key is kept, for when it is sent again",
            ge=1,
            le=86400,
        ),
    ] = 600.0


class TokenizerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer and detokenizer processes."""

    tokenizers: Annotated[int, Meta(description="tokenizer processes", ge=1, le=64)] = 1
    template_timeout: Annotated[
        float, Meta(description="seconds a chat template may take to render before it is killed", ge=0.05, le=60)
    ] = 2.0
    grammar_timeout: Annotated[
        float, Meta(description="seconds a request's grammar may take to compile before it is refused", ge=0.05, le=60)
    ] = 2.0


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching, the KV block pool and the prefix cache."""

    max_seqs: (
        Annotated[
            int, Meta(description="requests that run at once (default: 64 on a CPU, 256 on a GPU)", ge=1, le=4096)
        ]
        | None
    ) = None
    max_step_tokens: (
        Annotated[int, Meta(description="most tokens in one step, prefill and decode together", ge=16, le=1 << 20)]
        | None
    ) = None
    prefill_chunk: (
        Annotated[int, Meta(description="most prompt tokens of one request in one step", ge=1, le=1 << 20)] | None
    ) = None
    policy: Annotated[
        PolicyName,
        Meta(
            description="which waiting request starts next: first come; lowest priority number, ageing; longest cached "
            "prefix; fair share per API key; earliest TTFT target"
        ),
    ] = "fcfs"
    priority_age_seconds: Annotated[
        float,
        Meta(
            description="priority policy: waiting this long counts like one priority step; longest-prefix: the longest "
            "that anyone is overtaken; deadline: the target of a request that has none",
            ge=0.001,
            le=86400,
        ),
    ] = 30.0
    batch_wait_ms: Annotated[
        float, Meta(description="an idle engine waits up to this long for more requests to start with", ge=0, le=10000)
    ] = 0.0
    prefer: Annotated[
        Preference,
        Meta(
            description="what shares a step: prefill and decode together; prompts alone first; or prompts only when "
            "nothing decodes"
        ),
    ] = "mixed"
    max_itl_ms: (
        Annotated[
            float,
            Meta(
                description="longest gap between two tokens of a running stream: prefill chunks and the number of "
                "running requests are sized to keep it (default: no limit)",
                ge=1,
                le=60000,
            ),
        ]
        | None
    ) = None
    ttft_target_ms: (
        Annotated[
            float,
            Meta(
                description="requests whose predicted time to first token is longer get 429 at once; a request can set "
                "its own (default: none)",
                ge=1,
                le=3600000,
            ),
        ]
        | None
    ) = None
    kv_shortage: Annotated[
        Shortage,
        Meta(
            description="when KV blocks run out: start a request only when its longest output fits; preempt and "
            "recompute; or preempt and keep its blocks in host memory"
        ),
    ] = "recompute"
    eviction: Annotated[
        EvictionName,
        Meta(description="which unused cached prefix goes first: least recently or least often used, oldest"),
    ] = "lru"
    pinned_share: Annotated[
        float, Meta(description="share of the KV pool that pinned prefixes may hold", ge=0, le=0.9)
    ] = 0.25
    long_prompt_tokens: Annotated[
        int, Meta(description="a prompt longer than this is isolated as a long one", ge=1, le=1 << 24)
    ] = 2048
    max_long_prefills: Annotated[int, Meta(description="long prompts that are computed at once", ge=1, le=4096)] = 2
    long_step_share: Annotated[
        float, Meta(description="share of a step's prompt tokens for long prompts while short ones wait", ge=0.01, le=1)
    ] = 0.5
    long_pool_share: Annotated[
        float, Meta(description="share of the KV pool that several long requests together may hold", ge=0.01, le=1)
    ] = 0.9
    stop_on_loop: Annotated[
        int,
        Meta(
            description="end an output whose last tokens are one sequence repeated this often; 0: never. A request can "
            "set its own",
            ge=0,
            le=1000,
        ),
    ] = 0
    event_log: Annotated[
        str, Meta(description="file to record the scheduler's events in, without any text, for tools.simulate --replay")
    ] = ""
    block_size: Annotated[int, Meta(description="token positions in one KV block", ge=1, le=256)] = 16
    prefix_cache: Annotated[bool, Meta(description="keep the KV of finished prompts and reuse shared prefixes")] = True
    max_queue_requests: Annotated[
        int, Meta(description="requests that may wait; further ones get 429", ge=1, le=1 << 20)
    ] = 2048
    max_queue_tokens: Annotated[
        int, Meta(description="prompt tokens that may wait; further requests get 429", ge=1, le=1 << 32)
    ] = 4 << 20


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks: device, parallelism, memory."""

    device: Annotated[
        Device, Meta(description="where the model runs (auto: on a GPU, where there is one that can be used)")
    ] = "auto"
    tp: Annotated[
        int,
        Meta(
            description="tensor-parallel ranks, one process each; heads need not divide, but each rank needs one",
            ge=1,
            le=64,
        ),
    ] = 1
    kv_memory: Annotated[
        str | None, Meta(description="memory for the KV cache of each rank, such as 512MiB or 4GiB (default: measured)")
    ] = None
    host_kv_memory: Annotated[
        str | None,
        Meta(
            description="memory of each rank for KV blocks that do not fit the KV cache, such as 2GiB (default: none; "
            "with --kv-shortage swap as much as the KV cache)"
        ),
    ] = None
    gpu_memory_share: Annotated[
        float, Meta(description="share of each GPU's memory that the engine may use", ge=0.05, le=1)
    ] = 0.9
    cuda_graphs: Annotated[
        bool | None, Meta(description="replay decode steps as CUDA graphs, captured at start (default: on for cuda)")
    ] = None
    max_graph_seqs: (
        Annotated[
            int,
            Meta(
                description="largest decode batch that is captured as a CUDA graph; 0: none (default: --max-seqs, at "
                "most 256)",
                ge=0,
                le=4096,
            ),
        ]
        | None
    ) = None
    threads: (
        Annotated[
            int,
            Meta(description="CPU threads of each rank: they compute on a CPU, with a GPU they load", ge=1, le=1024),
        ]
        | None
    ) = None
    pin_threads: Annotated[
        bool, Meta(description="bind each compute thread to a physical core of its own, so that ranks share none")
    ] = False
    kernels: Annotated[
        Literal["auto", "native", "torch", "triton"],
        Meta(
            description="on a CPU compiled C++ (native) or plain torch operations (torch), auto: native where they can "
            "be compiled; on a GPU always triton, which on a CPU is interpreted, to debug it: very slow"
        ),
    ] = "auto"
    deterministic: Annotated[
        bool | None,
        Meta(description="same request, same tokens, whatever else runs (default: on for CPU, off for cuda)"),
    ] = None


class SupervisorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Starting, watching and stopping the processes."""

    max_restarts: Annotated[
        int, Meta(description="restarts allowed within a minute; 0: the first death of a process ends everything", ge=0)
    ] = 3
    recovery_timeout: Annotated[
        float, Meta(description="seconds that running requests wait for killed ranks to come back", ge=1, le=3600)
    ] = 60.0
    hang_timeout: Annotated[
        float,
        Meta(
            description="seconds after which a process that does not answer is killed and replaced; of a rank's "
            "steps, 5 times the predicted time if that is longer",
            ge=1,
            le=86400,
        ),
    ] = 30.0
    ready_timeout: Annotated[float, Meta(description="seconds within which everything must be ready", ge=1)] = 300.0
    drain_timeout: Annotated[
        float, Meta(description="seconds that running requests get to finish after SIGTERM", ge=0)
    ] = 30.0
    record: Annotated[
        str,
        Meta(
            description="file to record a trace of the requests in, without any text, for tools.simulate and "
            "tools.loadgen"
        ),
    ] = ""
    measure: Annotated[
        bool,
        Meta(
            description="take down when what happens: latencies in /metrics, timelines of requests, what /diagnose is "
            "made of; without, only counters are kept"
        ),
    ] = True
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="what is written to stderr")
    ] = "info"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Before `resolve`, fields may be None or "auto"; after it, only `quantization` is."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    sdk: SdkConfig = SdkConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()


class RopeConfig(Struct, frozen=True, kw_only=True):
    """Rotary embedding settings; the field names are those of the Hugging Face `rope_scaling` entry."""

    theta: float = 10000.0
    type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


class WeightFormats(Struct, frozen=True, kw_only=True):
    """How a checkpoint keeps its matrices; int4 and int8 are codes with a scale for each group of inputs of a row."""

    layers: dict[WeightFormat, int] = {}  # elements of the layers' matrices by format; empty: all are bfloat16
    embedding: WeightFormat = "bfloat16"
    head: WeightFormat = "bfloat16"  # when tied, that of the embedding
    group: int = 32  # inputs with one scale in the file; backends may make smaller groups of them
    has_minimums: bool = True  # whether int4 groups have a minimum, or a zero point, of their own


class ModelArch(Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model, the same for every checkpoint format. Sizes are counts of elements."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding: every token id must be below it
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    windows: tuple[int, ...] = ()  # by layer: last positions that a token attends to, 0 for all; empty: all in each
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()  # union over config, generation_config and tokenizer
    weight_bytes: int = 0  # size of the tensors in the file(s)
    num_parameters: int = 0
    formats: WeightFormats = WeightFormats()
    name: str = ""
    pooling: str = ""  # how the checkpoint says that embeddings are made; empty: it does not


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """What a model recommends for requests that do not say; None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class Endpoints(Struct, frozen=True, kw_only=True):
    """ZeroMQ addresses of one run; all lie in its private directory."""

    clients: tuple[str, ...]  # one ROUTER per tokenizer: HTTP frontends and SDK clients connect here
    scheduler: str  # ROUTER for tokenizers
    workers: str  # ROUTER for ranks
    stats: str  # PUB of the scheduler's counters
    traces: dict[str, str] = {}  # PUB of what each process tells of its work, by "role-index"


class ChildSpec(Struct, frozen=True, kw_only=True):
    """All that one child process needs to know; written by the launcher, read by `launch.child`."""

    role: Literal["frontend", "tokenizer", "scheduler", "worker"]
    index: int
    config: Config
    arch: ModelArch
    model_path: str  # local directory or .gguf file
    served_names: tuple[str, ...]
    endpoints: Endpoints
    run_dir: str
    incarnation: int  # of this run; messages of another are dropped
    kv_memory_bytes: int  # for each rank
    num_blocks: int  # KV blocks of each rank, decided by the memory plan
    num_host_blocks: int = 0  # likewise, of the host tier
    cpus: tuple[int, ...] = ()  # ranks: what each compute thread is bound to; empty: nothing
    listen_fd: int = -1  # frontends: the bound TCP socket
    rendezvous_port: int = 0  # ranks: torch.distributed on loopback when tp > 1
    generation: GenerationDefaults = GenerationDefaults()
    after_crash: bool = False  # ranks: one of those that these replace has crashed by itself, without a word
    gpu_bytes: int = 0  # ranks: of their GPU's memory that they may use; 0: they have none
    asked: Config | None = None  # scheduler: what `config` was before it was resolved, and
    machine: Machine | None = None  # on what; None where no launcher has done that
