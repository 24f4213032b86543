"""What the scheduler publishes for anyone who listens (PUB; may be lost). Its form is that of `messages`."""

from typing import Literal

from .messages import Message

# Upper bounds of the buckets in which `Stats` counts; one further bucket has what is above.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds

# Why a step had no more in it, although something was left to compute; "nothing": all that there was is in it.
StepLimit = Literal[
    "nothing",
    "max_seqs",
    "max_step_tokens",
    "kv_blocks",
    "max_itl_ms",
    "batch_wait_ms",
    "long_prompts",
    "prefill_chunk",
    "prefer",
    "suspect",
]


class ProcessUsage(Message, frozen=True):
    """What one process has used since its start."""

    name: str  # such as "worker-1"
    cpu_seconds: float  # of all its threads
    lags: tuple[int, ...] = ()  # looks at its event loop by how late they came, as in `LAG_BOUNDS`; empty: it has none
    lag_seconds: float = 0.0  # their sum


class TokenizerWork(Message, frozen=True):
    """What one tokenizer process does at the moment, and what it has done since its start."""

    encoding: int  # prompts that are being encoded, or wait for it
    prompts: int  # encoded
    encode_seconds: float  # spent on that, on all threads
    encode_wait_seconds: float  # that prompts waited for a thread
    renders: int  # chat templates,
    render_seconds: float  # from asking the child to its answer
    grammars: int  # compiled, or refused,
    grammar_seconds: float  # likewise
    detokenize_seconds: float  # spent on turning the tokens of steps into text
    child_wait_seconds: float = 0.0  # that templates and grammars waited for those before them


class Stats(Message, frozen=True):
    """Counters since start and gauges of one moment; published a few times a second."""

    time: float  # unix seconds
    step: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int  # held by the prefix cache, in use or not
    blocks_private: int  # of running requests, and not (yet) in the prefix cache
    blocks_in_transit: int  # released, but named by a step that has not come back yet
    prompt_tokens: int  # admitted
    cached_tokens: int  # of which found in the prefix cache
    computed_tokens: int
    generated_tokens: int  # sampled and sent, those behind a stop string included
    preemptions: int
    finished: int
    aborted: int
    refused: int
    oldest_request_seconds: float  # since the last progress of the request that has waited longest for any
    stuck_request: str = ""
    device_busy_seconds: float = 0.0
    engine_ready: bool = True  # False while the ranks are being restarted
    recoveries: int = 0
    waiting_tokens: int = 0  # prompt tokens of the waiting requests
    refused_deadline: int = 0  # of the refused: predicted to miss their TTFT target
    recomputed_tokens: int = 0  # computed before and lost to a preemption or a recovery
    evicted_blocks: int = 0  # cached blocks given up for good
    swapped_out_blocks: int = 0  # copied to the host tier
    swapped_in_blocks: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    pinned_blocks: int = 0
    loop_stops: int = 0
    blocks_unused: int = 0  # of the cached ones: those that nobody uses at the moment
    prefill_tokens: int = 0  # of the computed ones: those of prompts, and what was lost and is computed again
    step_tokens: tuple[int, ...] = ()  # steps by tokens computed, as in `STEP_TOKEN_BOUNDS`
    limits: tuple[tuple[StepLimit, int], ...] = ()  # and the steps that each limited
    # Of rank 0, by what it did: a step's parts, and the time between steps, in which it sends, waits and reads.
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    score_seconds: float = 0.0
    between_seconds: float = 0.0
    empty_seconds: float = 0.0  # without a step in flight, and without requests
    starved_seconds: float = 0.0  # without a step in flight, although there were requests
    processes: tuple[ProcessUsage, ...] = ()  # all but the frontends and the launcher
    tokenizers: tuple[TokenizerWork, ...] = ()


class LiveRequest(Message, frozen=True):
    """One choice that has not ended, for people to look at; nothing of its text."""

    id: str  # the client's name for it; several choices may share it
    tenant: str
    state: Literal["waiting", "prefill", "decode"]
    prompt_tokens: int
    cached_tokens: int  # of them found in the prefix cache
    computed_tokens: int  # positions whose KV has been planned
    generated_tokens: int
    age_seconds: float  # since its arrival
    preemptions: int


class CachedPrefix(Message, frozen=True):
    """One node of the prefix tree: a run of blocks that several prompts may continue."""

    digest: str  # of namespace and first block, keyed anew at each start: tells nodes apart, and nothing of the text
    namespace: str
    blocks: int
    end: int  # tokens from the start of the prompt to the node's end
    on_host: bool
    children: int
    users: int  # running requests whose prefix goes through it
    uses: int  # matches and insertions so far
    idle_seconds: float  # since its last use, to about a second; at least so long when that is far back


class EngineDetails(Message, frozen=True):
    """What Stats only counts: some requests, and the largest nodes of the prefix tree. Sent only to who asks."""

    time: float  # unix seconds
    requests: tuple[LiveRequest, ...]  # running ones first, each kind in the order of arrival
    prefixes: tuple[CachedPrefix, ...]  # largest first
    prefix_nodes: int  # nodes of the tree, when it was last walked through


# What can hold a workload back; "load": nothing, there is too little to do; "device": it does all that it can.
CauseName = Literal["queue", "prefill", "decode", "kv_memory", "cpu", "client", "load", "device"]

MetricName = Literal["ttft", "ttft_p99", "itl", "itl_p99", "throughput", "concurrency"]


class Cause(Message, frozen=True):
    """One thing that bounds a metric."""

    cause: CauseName
    evidence: str  # a sentence with the numbers that say so
    setting: str = ""  # the flag to change; empty: none would help
    before: str = ""  # its value
    after: str = ""  # and the one to try
    predicted: float = 0.0  # the metric after the change alone; without one, its value
    confidence: float = 0.0  # 0 to 1: in the prediction
    effects: tuple[tuple[MetricName, float], ...] = ()  # the other metrics after the change


class DiagnosedMetric(Message, frozen=True):
    """One metric, what it is made of, and what bounds it."""

    name: MetricName
    value: float  # seconds, output tokens a second, or requests that run at once
    parts: tuple[tuple[str, float], ...]  # of its mean: seconds, or shares of the time
    causes: tuple[Cause, ...]  # whose change would improve it most, first


class Diagnosis(Message, frozen=True):
    """What bounds the engine at the moment. Sent only to who asks."""

    time: float  # unix seconds
    seconds: float  # that it looks back
    arrived: int  # requests in that time,
    finished: int
    measures: tuple[tuple[str, float], ...]  # further numbers by name: seconds, shares from 0 to 1, counts
    metrics: tuple[DiagnosedMetric, ...]  # of those there is something to say of
    summary: str  # a sentence


FromStats = Stats | EngineDetails | Diagnosis
