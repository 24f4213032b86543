"""Messages between processes: one tagged union per edge.

Array-like and tagged by class name, so the wire carries no field names; a new field is appended with a default, and
readers of the older form still understand it. Token ids, block ids and other integer columns travel as raw
little-endian int32 bytes (`bytes` fields whose comment says so), never as lists. Every integer that indexes something
is checked by its receiver after decoding.
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length"]


class Message(Struct, tag=True, tag_field="message_type", array_like=True, gc=False, frozen=True):
    """Base of everything that is sent."""


# --- client (HTTP frontend, SDK) <-> tokenizer -----------------------------------------------------------------------


class ToolCall(Message, frozen=True):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    arguments: str  # JSON


class ChatMessage(Message, frozen=True):
    """One turn of a conversation, its text parts already joined."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's turn
    tool_call_id: str | None = None  # of a tool's turn: which call it answers
    reasoning: str = ""  # of an assistant's turn


class TextPrompt(Message, frozen=True):
    text: str


class ChatPrompt(Message, frozen=True):
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: bytes = b""  # JSON: OpenAI's list of function tools, for the template
    template_kwargs: bytes = b""  # JSON: an object of further names for the template


class TokenPrompt(Message, frozen=True):
    token_ids: bytes  # int32


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


class Grammar(Message, frozen=True):
    """What an output must match as a whole."""

    kind: GrammarKind
    source: str  # a JSON schema, a regular expression, a JSON list of strings, or llguidance's dialect of Lark
    origins: dict[int, str] = {}  # by line (from 1) of a Lark source: the field it was made from, for errors


class SamplingParams(Message, frozen=True):
    """What a client may ask of the sampler; the defaults are OpenAI's. `ipc.validation` holds the bounds."""

    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # looks at prompt and output
    presence_penalty: float = 0.0  # looks at the output only, as does frequency_penalty
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    n: int = 1
    stop_on_loop: int | None = (
        None  # repeats of one sequence at the end that end the output; 0: off; None: the server's
    )
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is sampled; empty: no such limit
    bad_words: tuple[str, ...] = ()  # never generated
    prompt_logprobs: int | None = None  # None: none; k: of each prompt token, and of the k best there
    shown_special_tokens: tuple[str, ...] = ()  # those that have text although `skip_special_tokens` is set


Pooling = Literal["", "last"]  # not empty: no output but an embedding, the hidden state of the prompt's last token


class Generate(Message, frozen=True):
    request_id: int  # unique among the live requests of this client
    prompt: TextPrompt | ChatPrompt | TokenPrompt
    params: SamplingParams
    external_id: str = ""  # x-request-id, for logs and timelines only
    namespace: str = ""  # prefix-cache namespace, set by the authenticated frontend
    tenant: str = ""  # whose fair share this uses, set by the frontend
    priority: int = 0  # lower goes first, under the priority policy
    ttft_target_ms: float | None = None  # refuse at once when the first token is predicted to come later
    cache_pin_seconds: float = 0.0  # keep the prompt's KV cached at least this long
    return_prompt: bool = False  # answer with `PromptInfo` first, as also `params.prompt_logprobs` makes it
    pooling: Pooling = ""


class Abort(Message, frozen=True):
    request_id: int


class Hello(Message, frozen=True):
    """First message of a client on a new connection."""

    client: str


class Tokenize(Message, frozen=True):
    """Asks what token ids a prompt has; answered by `Tokenized` or `Failed`."""

    request_id: int  # as that of `Generate`
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True  # such as a begin-of-sequence token; templates of chats write theirs themselves
    return_token_strs: bool = False


class Detokenize(Message, frozen=True):
    """Asks for the text of token ids, special tokens written out; answered by `Detokenized` or `Failed`."""

    request_id: int
    token_ids: bytes  # int32


ToTokenizer = Generate | Abort | Hello | Tokenize | Detokenize


class SamplingDefaults(Message, frozen=True):
    """What requests over HTTP that do not say get: the model's own recommendation, else OpenAI's default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: the model recommends nothing


class ModelInfo(Message, frozen=True):
    """What a client needs to know of the served model."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    created: int  # unix seconds
    has_chat_template: bool
    defaults: SamplingDefaults = SamplingDefaults()
    special_tokens: dict[str, int] = {}  # ids by text
    template_kwargs: tuple[str, ...] = ()  # names that `ChatPrompt.template_kwargs` may have
    tool_format: str = ""  # how the model writes tool calls: the name of a parser; empty: not known
    reasoning_format: str = ""  # likewise, of what it thinks before it answers; empty: it does not, or unmarked
    max_queue_requests: int = 1 << 20  # choices that can wait at once
    max_queue_tokens: int = 1 << 32  # prompt tokens that can, each choice's counted


class Welcome(Message, frozen=True):
    """Answer to `Hello`, sent once the engine behind can take requests."""

    model: ModelInfo


class TokenLogprob(Message, frozen=True):
    """Log-probability (natural logarithm, after penalties and bias, before temperature) of one token."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class PositionLogprobs(Message, frozen=True):
    """The chosen token of one output position and the best alternatives there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    offset: int = 0  # where the token, or the character that it is a part of, begins in the output, in characters


class PromptPosition(Message, frozen=True):
    """The log-probability that the model gave one token of the prompt, after those before it."""

    chosen: TokenLogprob  # what stands there
    rank: int  # 1: the most likely token
    top: tuple[TokenLogprob, ...]  # the best ones there, best first


class PromptInfo(Message, frozen=True):
    """The prompt of a request that asked for it, before anything of its choices."""

    request_id: int
    token_ids: bytes  # int32
    text: str
    offsets: bytes  # int32: where in `text` each token begins, in characters; empty as `positions` are
    first_token: str  # its text; of the others, `positions` have it
    positions: tuple[PromptPosition, ...] = ()  # of all tokens but the first; empty unless asked for


class Delta(Message, frozen=True):
    """New text of one choice; empty while a character or a possible stop string is pending."""

    request_id: int
    index: int
    text: str
    token_ids: bytes  # int32
    logprobs: tuple[PositionLogprobs, ...] = ()
    in_reasoning: bool = False  # the prompt has already opened the reasoning with which the output begins
    prompt_tokens: int = 0  # in all deltas of a choice the same


class Finished(Message, frozen=True):
    """The end of one choice; a request has ended when all its `n` choices have."""

    request_id: int
    index: int
    reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id that matched, None for end of sequence and length
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    embedding: bytes = b""  # float32, of length 1; where the request asked for `pooling`


class Failed(Message, frozen=True):
    """The end of a request by an error, shaped like the HTTP error object.

    Towards clients it ends all choices; from the scheduler, which knows each choice as a request, that one.
    """

    request_id: int
    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


class Outputs(Message, frozen=True):
    """Everything one step has for one client."""

    items: tuple[Delta | Finished | Failed | PromptInfo, ...]


class Tokenized(Message, frozen=True):
    """Answer to `Tokenize`."""

    request_id: int
    token_ids: bytes  # int32
    token_strs: tuple[str, ...] = ()  # as the vocabulary spells them, when asked for


class Detokenized(Message, frozen=True):
    """Answer to `Detokenize`."""

    request_id: int
    text: str


ToClient = Welcome | Outputs | Tokenized | Detokenized

# --- tokenizer <-> scheduler -----------------------------------------------------------------------------------------


class SamplingSpec(Message, frozen=True):
    """What a worker's sampler needs to know; every field has been validated."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # unsigned 64 bits; drawn at admission where the client gave none
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: bytes  # int32
    bias_values: bytes  # float32, as many
    min_tokens: int
    banned_ids: bytes  # int32: end-of-sequence and stop ids, impossible before min_tokens outputs
    logprobs: int  # -1: none; k >= 0: the chosen token's and the k best
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


class AbortRequests(Message, frozen=True):
    request_ids: tuple[int, ...]


class StopAt(Message, frozen=True):
    """A stop string was found: the output ends after `num_tokens` tokens, whatever has been generated since."""

    request_id: int
    num_tokens: int


class TokenizerHello(Message, frozen=True):
    index: int


ToScheduler = Submit | AbortRequests | StopAt | TokenizerHello


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
    score_us: int = 0  # spent on those
    completed: tuple[int, ...] = ()  # indices of rows whose output is now all that their grammar allows
    failed: tuple[RowFailure, ...] = ()
    embeddings: tuple[bytes, ...] = ()  # empty, or float32 [hidden] for each row with `pooling` and b"" for the others


class StepFailed(Message, frozen=True):
    """The last word of a rank that ends because it could not carry out this step; any rank may send it."""

    step: int


FromWorker = WorkerReady | StepResult | StepFailed

# --- scheduler -> anyone (PUB; may be lost) --------------------------------------------------------------------------


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
