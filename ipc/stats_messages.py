"""What the scheduler publishes for anyone who listens (PUB; may be lost). Its form is that of `messages`."""

from typing import Literal

from .messages import Message


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


FromStats = Stats | EngineDetails
