"""Messages inside the engine: tokenizer <-> scheduler <-> worker. Their form is that of `messages`."""

from .messages import ChoiceTimings, ClientReport, Failed, FinishReason, Message, Pooling
from .stats_messages import ProcessUsage, TokenizerWork

# --- tokenizer <-> scheduler -----------------------------------------------------------------------------------------


class SamplingSpec(Message, frozen=True):
    """What a worker's sampler needs to know; every field has been validated. By default greedy, and nothing else."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # unsigned 64 bits; drawn at admission where the client gave none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: bytes = b""  # int32
    bias_values: bytes = b""  # float32, as many
    min_tokens: int = 0
    banned_ids: bytes = b""  # int32: end-of-sequence and stop ids, impossible before min_tokens outputs
    logprobs: int = -1  # -1: none; k >= 0: the chosen token's and the k best
    prompt_logprobs: int = -1  # likewise, of each prompt token but the first
    allowed_ids: bytes = b""  # int32: nothing else may be sampled; empty: no such limit
    bad_words: tuple[bytes, ...] = ()  # int32 each: its last id is impossible where the output ends with those before
    grammar: str = ""  # for llguidance's LLMatcher; empty: none


class Submit(Message, frozen=True):
    """One choice to generate. The tokenizer has already expanded `n` and bounded `max_tokens`."""

    request_id: int  # unique among the live requests of this tokenizer
    token_ids: bytes  # int32, at least one
    max_tokens: int
    min_tokens: int
    stop_token_ids: bytes  # int32: end-of-sequence ids (unless ignored) and the request's own
    sampling: SamplingSpec
    namespace: str = ""
    external_id: str = ""  # the client's name for it, to tell people by
    tenant: str = ""
    priority: int = 0
    ttft_target_ms: float | None = None  # None: the scheduler's own setting
    cache_pin_seconds: float = 0.0
    stop_on_loop: int = 0
    score_prompt: bool = False  # its sampling wants log-probabilities of the prompt, so no cached KV stands in for it
    pooling: Pooling = ""
    tells_timings: bool = False  # with each first token after a prefill too: its end may be found where no row tells it
    choice: int = 0  # which of its request's choices it is,
    choices: int = 1  # of so many, whose ids follow each other


class AbortRequests(Message, frozen=True):
    request_ids: tuple[int, ...]


class StopRequest(Message, frozen=True):
    """A stop string was found: the output has ended there, whatever has been generated since."""

    request_id: int


class TokenizerHello(Message, frozen=True):
    index: int


class TokenizerReport(Message, frozen=True):
    """What the process does; sent a few times a second."""

    usage: ProcessUsage
    work: TokenizerWork
    clients: tuple[ClientReport, ...] = ()  # the newest of each that reports to it


ToScheduler = Submit | AbortRequests | StopRequest | TokenizerHello | TokenizerReport


class SchedulerReady(Message, frozen=True):
    """The scheduler and all its ranks can take requests."""

    num_blocks: int
    block_size: int


class RawLogprobs(Message, frozen=True):
    """Log-probabilities of one sampled token."""

    chosen: float
    top_ids: bytes  # int32
    top_values: bytes  # float32


class PromptScores(Message, frozen=True):
    """Log-probabilities of consecutive prompt tokens of one request, k alternatives for each."""

    index: int  # which of the scheduled rows of its plan
    first: int  # the token that the first entry is of; that one is at least 1
    chosen: bytes  # float32
    ranks: bytes  # int32, 1: the most likely token
    top_ids: bytes  # int32, k for each token, best first
    top_values: bytes  # float32, likewise


class RowOutput(Message, frozen=True):
    """New tokens of one request; `finish` is set with the last ones."""

    request_id: int
    token_ids: bytes  # int32; may be empty when only `finish` is news
    finish: FinishReason | None = None
    stop_token: int | None = None  # the id that ended it
    cached_tokens: int = 0
    logprobs: tuple[RawLogprobs, ...] = ()
    loop: bool = False  # `finish` is "stop" because the output repeats itself
    prompt_scores: PromptScores | None = None  # those that follow the ones before
    embedding: bytes = b""  # float32, with the one token of a request with `pooling`
    # With `finish`; without it, and without a token, before the token that the end of a prefill has given a request
    # that wants it: that token counted among the steps, `last_token` 0.0.
    timings: ChoiceTimings | None = None


class StepOutputs(Message, frozen=True):
    """Everything one step has for one tokenizer.

    Rows with one token and nothing else to say are columns: a thousand of them cost one message struct.
    """

    rows: tuple[RowOutput | Failed, ...]
    plain_ids: bytes = b""  # int64: request ids of the plain rows
    plain_tokens: bytes = b""  # int32: one token of each


FromScheduler = SchedulerReady | StepOutputs

# --- scheduler <-> worker --------------------------------------------------------------------------------------------


class NewRow(Message, frozen=True):
    """A request that takes a row of the worker's state, in full: at its first step, and again after a preemption."""

    row: int
    token_ids: bytes  # int32: prompt and, after a preemption, the outputs so far
    num_prompt: int  # of which this many are the prompt (penalties and RNG counters count outputs from here)
    block_ids: bytes  # int32, the block table so far, shared prefix first
    sampling: SamplingSpec
    num_scored: int = 0  # of the prompt log-probabilities that it asks for, those that are known already
    pooling: Pooling = ""


class StepPlan(Message, frozen=True):
    """One step of the model. Known rows carry only what changed.

    `scheduled` rows have four columns: row, start position, number of tokens, 1 if the token after the last one is to
    be sampled. The worker takes token ids from its own copy of the row, into which it also writes what it samples.

    Plans are carried out in order. The copies of a plan may run beside its forward, which touches none of their blocks,
    and are complete before anything of the next plan begins. A plan can have copies and nothing to compute.
    """

    step: int
    new_rows: tuple[NewRow, ...]
    freed_rows: bytes  # int32: rows whose request has ended or was preempted
    new_blocks: bytes  # int32 x 3: row, index in its block table, block id
    scheduled: bytes  # int32 x 4: row, start, count, sample
    copies_out: bytes = b""  # int32 x 2: KV block id, host block id
    copies_in: bytes = b""  # int32 x 2: host block id, KV block id


ToWorker = StepPlan


class WorkerReady(Message, frozen=True):
    rank: int
    num_blocks: int
    num_host_blocks: int = 0
    after_crash: bool = False  # it replaces a rank that crashed without a word, or the companion of one


class RowFailure(Message, frozen=True):
    """A sampling row whose request can't go on, and none of its tokens counts; `message` is for the client."""

    index: int  # among the sampling rows of the plan
    message: str


class StepResult(Message, frozen=True):
    """Sampled tokens of one step, in the order of the sampling rows of its plan; only rank 0 sends it.

    The times are those of rank 0, one after the other: `between_us` from the end of its last step to the start of this
    one, in which it sends that one's result, waits for the plan and reads it.
    """

    step: int
    token_ids: bytes  # int32
    logprobs: tuple[RawLogprobs | None, ...] = ()  # empty, or as long as token_ids
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    between_us: int = 0
    prompt_scores: tuple[PromptScores, ...] = ()  # of the scheduled rows that want them, in order
    score_us: int = 0  # spent on those and on embeddings
    completed: tuple[int, ...] = ()  # indices of rows whose output is now all that their grammar allows
    failed: tuple[RowFailure, ...] = ()
    embeddings: tuple[bytes, ...] = ()  # empty, or float32 [hidden] for each row with `pooling` and b"" for the others


class StepFailed(Message, frozen=True):
    """The last word of a rank that ends because it could not carry out its step; any rank may send it."""


class RankReport(Message, frozen=True):
    """What the process uses; sent about once a second, by every rank."""

    usage: ProcessUsage


FromWorker = WorkerReady | StepResult | StepFailed | RankReport
