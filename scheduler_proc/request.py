"""One choice being generated, as the scheduler sees it."""

from array import array
from enum import Enum, auto

from ipc.messages import SamplingSpec, Submit
from scheduler_proc.radix_tree import Node


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class Request:
    """Token counts and KV blocks of one request.

    Two counts drive everything. `num_planned` positions have been given to some step; `num_tokens` exist, where a token
    that a running step will sample counts although its id is not known yet. A step gives a request some of the tokens
    between the two, and the request samples when they meet.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "cached_tokens",
        "epoch",
        "external_id",
        "key",
        "last_progress",
        "lock",
        "max_tokens",
        "min_tokens",
        "namespace",
        "num_confirmed",
        "num_planned",
        "num_prompt",
        "num_unknown",
        "peer",
        "private_blocks",
        "request_id",
        "row",
        "sampling",
        "state",
        "stop_token_ids",
        "tokens",
    )

    def __init__(self, peer: bytes, submit: Submit, tokens: "array[int]", arrival: float) -> None:
        self.peer = peer
        self.request_id = submit.request_id
        self.external_id = submit.external_id
        self.namespace = submit.namespace
        self.max_tokens = submit.max_tokens
        self.min_tokens = submit.min_tokens
        self.sampling: SamplingSpec = submit.sampling
        stops: array[int] = array("i")
        stops.frombytes(submit.stop_token_ids)
        self.stop_token_ids = frozenset(stops)
        self.tokens = tokens  # prompt and known outputs
        self.num_prompt = len(tokens)
        self.num_unknown = 0  # outputs that running steps will sample
        self.num_planned = 0
        self.num_confirmed = 0  # positions whose KV is known to be in the pool
        self.cached_tokens = -1  # prefix found in the cache at first admission; -1 before it
        self.block_table: list[int] = []
        self.private_blocks: set[int] = set()  # those of the table that the tree does not own
        self.lock: Node | None = None
        self.row = -1
        self.epoch = 0  # goes up at each preemption, so that results planned before it are known as void
        self.state = State.WAITING
        self.arrival = arrival
        self.last_progress = arrival

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_unknown

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_more(self) -> bool:
        """False when the last allowed output is already being sampled."""
        return self.num_tokens - self.num_prompt < self.max_tokens
