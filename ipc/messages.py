"""Messages between a client (the HTTP frontend, the SDK) and the tokenizer, and what all messages have in common.

One tagged union per edge and direction; those of the engine's other edges are in `engine_messages` and
`stats_messages`.

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


# Not empty: no output but an embedding, made of hidden states of the prompt: the last token's, the mean of all tokens',
# or the first token's.
Pooling = Literal["", "last", "mean", "cls"]


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
    deadline: float | None = None  # seconds, from when the tokenizer process has it, until it is ended
    # Not empty: a further request of this tenant with this key and all else equal gets the answer of the first.
    idempotency_key: str = ""


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


class ClientReport(Message, frozen=True):
    """How the client's process does, about once a second; a diagnosis tells by it when that is what is slow."""

    name: str  # such as "frontend-0"
    cpu_seconds: float  # of all its threads, since its start
    lag_looks: int  # at how late its event loop is, since its start,
    lag_seconds: float  # and the sum of what they found
    slow: int = 0  # connections whose other end does not read what it is sent, at this moment,
    backlog: int = 0  # and bytes that wait for them


ToTokenizer = Generate | Abort | Hello | Tokenize | Detokenize | ClientReport


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
    pooling: Pooling = "last"  # how its embeddings are made for requests that do not say


class Welcome(Message, frozen=True):
    """Answer to `Hello`, sent once the engine behind can take requests."""

    model: ModelInfo


class Paused(Message, frozen=True):
    """The engine takes no requests until the next `Welcome`, which may come from a successor."""

    reason: str


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


class ChoiceTimings(Message, frozen=True):
    """What the scheduler knows of a choice's way. Times are seconds of the engine machine's monotonic clock, which its
    processes share; 0.0: it never came to that."""

    queued: float = 0.0  # the scheduler has it
    first_scheduled: float = 0.0  # the first step that computes tokens of it has been planned
    first_token: float = 0.0  # the result with its first token has come
    last_token: float = 0.0
    steps: int = 0  # that computed tokens of it
    preemptions: int = 0
    # The steps that computed tokens of its prompt (or again, after a preemption), in order; of more than 64, the last
    # entry stands for the rest. When each was planned and when its result came (float64), and its tokens (int32).
    chunk_starts: bytes = b""
    chunk_ends: bytes = b""
    chunk_tokens: bytes = b""


class Timings(Message, frozen=True):
    """When what happened to one choice in the engine: times as in `ChoiceTimings`."""

    clock_offset: float  # to be added for Unix time
    received: float  # the tokenizer process has the request
    tokenized: float  # its token ids are known and its grammar is compiled
    finished: float  # its end leaves the tokenizer process
    scheduler: ChoiceTimings


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
    timings: Timings | None = None


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


ToClient = Welcome | Paused | Outputs | Tokenized | Detokenized
