"""One choice being generated, as the scheduler sees it."""

from array import array
from enum import Enum, auto
from typing import Literal

from ipc.engine_messages import SamplingSpec, Submit
from scheduler_proc.loops import LoopDetector
from scheduler_proc.radix_tree import Node
from scheduler_proc.timeline import Timeline

End = Literal["stop", "length", "abort", "error", "refused"]


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class Request:
    """Token counts and KV blocks of one request.

    `num_planned` positions have been given to some step. Until that reaches the known tokens the request is
    prefilling; from then on it decodes: every step takes one more position and samples the token after it, so that
    `num_planned + 1` tokens exist, the last ones perhaps only on the device.

    Steps run in the order of their plans, so a planned position is as good as a computed one for every later plan.
    """

    __slots__ = (
        "admitted_in",
        "arrival",
        "block_table",
        "cached_tokens",
        "capacity",
        "choice",
        "choices",
        "external_id",
        "first_valid_step",
        "is_long",
        "key",
        "last",
        "last_progress",
        "lock",
        "loop_detector",
        "losses",
        "lost_in_step",
        "lost_positions",
        "min_tokens",
        "namespace",
        "num_known",
        "num_planned",
        "num_prompt",
        "num_scored",
        "num_shared",
        "order",
        "peer",
        "pin_seconds",
        "plan_after",
        "pooling",
        "preemptions",
        "priority",
        "promised",
        "repeated",
        "request_id",
        "row",
        "sampling",
        "score_prompt",
        "started",
        "state",
        "stop_token_ids",
        "tells_timings",
        "tenant",
        "timeline",
        "tokens",
        "tokens_at_loss",
        "ttft_target",
        "uncached",
    )

    def __init__(
        self, peer: bytes, submit: Submit, tokens: "array[int]", arrival: float, order: int, *, measured: bool = True
    ) -> None:
        """`measured`: whether it has a timeline."""
        self.peer = peer
        self.request_id = submit.request_id
        self.choice, self.choices = submit.choice, submit.choices
        self.external_id = submit.external_id
        self.namespace = submit.namespace
        self.tenant = submit.tenant
        self.priority = submit.priority
        self.ttft_target = None if submit.ttft_target_ms is None else submit.ttft_target_ms / 1e3  # seconds
        self.pin_seconds = submit.cache_pin_seconds
        self.min_tokens = submit.min_tokens
        self.sampling: SamplingSpec = submit.sampling
        self.score_prompt = submit.score_prompt
        self.num_scored = 0  # prompt log-probabilities that have come back, of num_prompt - 1
        self.pooling = submit.pooling
        stops: array[int] = array("i")
        stops.frombytes(submit.stop_token_ids)
        self.stop_token_ids = frozenset(stops)
        self.loop_detector = LoopDetector(submit.stop_on_loop) if submit.stop_on_loop else None
        self.tokens = tokens  # prompt and known outputs
        self.num_prompt = len(tokens)
        self.uncached = self.num_prompt  # tokens to compute, as it looked when it arrived, or when all KV was lost
        self.repeated = 0  # leading tokens that an earlier prompt had too; set by the diagnosis' window
        self.is_long = False  # set by the planner, whose setting it is
        self.arrival = arrival
        self.order = order  # serial number of its arrival: no two are equal
        self.last_progress = arrival
        self.timeline = Timeline() if measured else None
        self.tells_timings = submit.tells_timings
        self.last = self.num_prompt + submit.max_tokens - 1  # the position that is sampled last, and never computed
        self.num_planned = 0
        self.num_known = 0  # tokens that were known when it was last admitted: what has to be prefilled
        self.first_valid_step = 0  # results of earlier steps are void: they were planned before it lost its blocks
        self.plan_after = -1  # the step whose copies fill some of its blocks: only later ones may compute with them
        self.cached_tokens = -1  # prefix found in the cache at first admission; -1 before it
        self.preemptions = 0  # how often it lost its blocks
        self.lost_positions = 0  # how many of them had been computed when it last did
        self.block_table: list[int] = []
        self.capacity = 0  # positions that the block table has room for
        self.num_shared = 0  # leading blocks of the table that the tree owns
        self.lock: Node | None = None  # the tree's node in which those end
        self.promised = 0  # further blocks that are kept available for it
        self.losses = 0  # how often running ranks died with it since it last got a token
        self.tokens_at_loss = 0
        self.lost_in_step = False  # the last time because a step failed, or a rank crashed in it
        self.row = -1  # of the workers' state; -1 unless running
        self.admitted_in = -1  # the step in which it last got a row,
        self.started = arrival  # and when
        self.key: tuple[float, int] = (0.0, order)  # place among the running ones: the last is preempted first
        self.state = State.WAITING

    @property
    def is_suspect(self) -> bool:
        """Ranks have failed in its steps more than once, and it has got no token since: it may be what kills them.

        Not so when they were killed: then requests that run one at a time would only be longer in danger.
        """
        return self.lost_in_step and self.losses > 1 and len(self.tokens) == self.tokens_at_loss

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the cache.

        At least the last token is computed anew, since the next one is sampled from its logits; and each one that tells
        a log-probability of the prompt that is not known yet, or whose hidden state is a part of an embedding.
        """
        if self.pooling in ("mean", "cls"):
            return 0
        last = len(self.tokens) - 1
        return min(last, self.num_scored) if self.is_scoring else last

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are missing yet."""
        return self.score_prompt and self.num_scored < self.num_prompt - 1

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt
