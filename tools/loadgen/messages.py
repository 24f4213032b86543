"""What the load generator's processes tell each other, and the records that it writes.

The parent gives each worker its `Work` as a file and speaks to it in lines on its standard input: `start SECONDS`, on
the clock of `time.monotonic`, which all processes of a machine share, and `stop`. The worker answers in lines of JSON.
"""

from typing import Any, Literal

from msgspec import Struct

API_KEY_VARIABLE = "OPENAI_API_KEY"

Api = Literal["tokens", "text", "chat"]
# How a server is asked for the tokens of each chunk: not at all; for their ids; for the usage so far.
ChunkTokens = Literal["", "ids", "usage"]
# Of one request. "ok": answered to its end with at least one token. "cancelled": the run was stopped before that.
Outcome = Literal["ok", "refused", "http", "connection", "truncated", "error", "empty", "timeout", "cancelled"]


class Item(Struct, array_like=True):
    """One request to send.

    `due`: seconds from the start of the run; in a closed loop seconds after the user's last answer (of the first
    request: after the start). `blocks`: see `tools.loadgen.prompts`. `body`: a whole request, sent as it is but for the
    fields that streaming and counting need; `path` is where.
    """

    index: int
    due: float
    input_length: int = 0  # tokens that the prompt is made of; 0: it is `text` or `body`
    output_length: int = 0  # tokens to be generated; 0: the target's `text_output`
    blocks: list[int] | None = None
    block_size: int = 0
    text: str = ""
    body: bytes = b""
    path: str = ""
    user: int = 0


class Target(Struct):
    """Where requests go, and what may be said there beyond OpenAI's protocol."""

    url: str = ""
    endpoints: tuple[str, ...] = ()  # ZeroMQ addresses: the SDK instead of HTTP
    key_file: str = ""  # with this client's key pair, where the server asks the SDK for keys
    server_key: str = ""  # the server's public key there
    model: str = ""
    api: Api = "tokens"
    temperature: float = 0.0
    text_output: int = 128  # most tokens of an answer whose length the source does not say
    timeout: float = 600.0  # seconds from sending to the end of the answer
    exact_output: bool = False  # the server knows ignore_eos
    chunk_tokens: ChunkTokens = ""
    tokenmill: bool = False  # the server knows stop_on_loop
    timings: bool = False  # ask for the server's own timeline of each request


class Work(Struct):
    """What one worker process does. `end`: seconds after which a closed loop sends nothing more. `content_seed`: of the
    prompts' tokens; `words`: of prompts that are text. The API key is in the environment, as `API_KEY_VARIABLE`."""

    target: Target
    worker: int
    run_id: str
    items: list[Item]
    closed: bool
    end: float
    content_seed: int
    token_range: tuple[int, int]
    words: tuple[str, ...]


class Record(Struct, kw_only=True, omit_defaults=True):
    """What became of one request. Times are seconds from the start of the run."""

    id: str  # as sent in x-request-id
    index: int
    worker: int
    scheduled: float
    sent: float
    ended: float
    outcome: Outcome
    measured: bool = True  # not in the warm-up, ramp or cool-down
    status: int = 0  # HTTP's; 0: none came
    detail: str = ""  # of what is not "ok"
    input_length: int = 0  # asked for, without what the server adds
    output_length: int = 0
    prompt_tokens: int | None = None  # as the server counts
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    written: float | None = None  # when all of it was the system's, where the client tells; connecting came before
    times: list[float] = []  # when each chunk with a token came
    tokens: list[int] = []  # tokens in each of these; empty: not known
    timings: dict[str, Any] | None = None  # the server's own


class Ready(Struct, tag=True):
    """The worker is connected and waits for the start."""


Ticks = list[tuple[float, float]]


class Progress(Struct, tag=True):
    """Twice a second, of the time since the last one. Seconds from the start of the run."""

    sent: int  # in all
    tokens: int  # in all; chunks, where the server does not say how many tokens they have
    begin: float
    end: float
    cpu: float  # share of a core
    ticks: Ticks  # when each tick of a timer was seen, and how late


class Answered(Struct, tag=True):
    record: Record


class Ended(Struct, tag=True):
    """The last message. Seconds."""

    ticks: Ticks  # since the last `Progress`
    tick: float  # the timer's period


class Broken(Struct, tag=True):
    """The worker cannot go on; one line for the user."""

    reason: str


FromWorker = Ready | Progress | Answered | Ended | Broken
