"""The settings that are searched, and what the server would make of each combination of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from config.machine import Machine
from config.resolve import resolve
from config.schema import Config, ModelArch, SchedulerConfig
from config.sources import ConfigError, Option, options
from tools.loadgen.slo import Slo
from tools.tune.search import Point

Value = int | float | str | None

_SMALL_STEP = 64  # tokens
_POWERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LONGEST_GAPS = (0.5, 0.7, 0.85, 1.0, 1.3)  # of the SLO's time between tokens
_GAPS_MS = (20.0, 50.0, 100.0, 200.0)  # where the SLO has none
_LATENESS = (0.7, 0.85, 1.0)  # of the SLO's TTFT

OPTIONS = {option.name: option for option in options() if option.section == "scheduler"}


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting and the values that are tried; the first is what the server would take."""

    name: str
    values: tuple[Value, ...]

    @property
    def option(self) -> Option:
        return OPTIONS[self.name]


class Candidate(msgspec.Struct, frozen=True):
    """What a server with some combination of the settings would run with."""

    config: SchedulerConfig
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What the values to try depend on: of the trace, in tokens."""

    longest_prompt: int
    requests: int
    shares_prefixes: bool


class Space:
    """All combinations. What the user has given of a setting stays as it is."""

    def __init__(
        self,
        asked: Config,
        arch: ModelArch,
        machine: Machine,
        *,
        given: Collection[str],
        slo: Slo,
        workload: Workload,
        only: Sequence[str] = (),
        may_refuse: bool = False,
    ) -> None:
        """`asked`: before `resolve`, which raises ConfigError when it cannot be. `only`: search no other settings.

        `given`: names of the settings that the user has said, which may be their defaults.
        """
        self._asked = asked
        self._given = given
        self._arch = arch
        self._machine = machine
        self.default = self._resolved(asked)
        self.dimensions = [
            dimension
            for dimension in self._dimensions(slo, workload, may_refuse)
            if len(dimension.values) > 1 and (not only or dimension.name in only)
        ]

    @property
    def sizes(self) -> list[int]:
        return [len(dimension.values) for dimension in self.dimensions]

    def settings(self, point: Point) -> dict[str, Value]:
        """Those that differ from the defaults."""
        pairs = zip(self.dimensions, point, strict=True)
        return {dimension.name: dimension.values[index] for dimension, index in pairs if index}

    def flags(self, point: Point) -> list[str]:
        """The same for the server's command line."""
        return flags_of(self.settings(point))

    def candidate(self, point: Point) -> Candidate | None:
        """None where the server would not start: settings that contradict each other, or do not fit into memory."""
        try:
            return self.with_settings(self.settings(point))
        except ConfigError:
            return None

    def with_settings(self, settings: Mapping[str, Value]) -> Candidate:
        """What these beside the user's own come to. ConfigError where the server would not start."""
        scheduler = msgspec.structs.replace(self._asked.scheduler, **settings)
        return self._resolved(msgspec.structs.replace(self._asked, scheduler=scheduler))

    def _resolved(self, asked: Config) -> Candidate:
        resolved = resolve(asked, self._arch, self._machine)
        if not resolved.plan.fits:
            raise ConfigError("these settings do not fit into memory; see python -m launch --plan")
        length = resolved.config.model.max_model_len
        assert length is not None
        return Candidate(resolved.config.scheduler, resolved.plan.num_blocks, resolved.plan.num_host_blocks, length)

    def _dimensions(self, slo: Slo, workload: Workload, may_refuse: bool) -> list[Dimension]:
        """Values that would do the same as another are left out."""
        default = self.default.config
        assert default.max_seqs is not None
        assert default.max_step_tokens is not None
        longest = min(workload.longest_prompt, self.default.max_model_len)
        useful_step = max(default.max_step_tokens, 2 * _at_least(longest))
        steps = [size for size in _POWERS if _SMALL_STEP <= size <= useful_step]
        gaps = sorted(
            {round(gap * share * 1e3, 1) for gap in (slo.tpot, slo.itl) if gap is not None for share in _LONGEST_GAPS}
        ) or list(_GAPS_MS)
        found = [
            self._choices("max_seqs", [size for size in _POWERS if size <= max(default.max_seqs, workload.requests)]),
            self._choices("max_step_tokens", steps),
            self._choices("prefill_chunk", [size for size in steps if size < longest]),
            self._choices("max_itl_ms", [gap for gap in gaps if gap >= 1]),
            self._choices("prefer", ["mixed", "prefill", "decode"]),
            self._choices("kv_shortage", ["recompute", "wait"]),
            self._choices("long_prompt_tokens", [size for size in _POWERS if _SMALL_STEP <= size < longest]),
        ]
        if longest > _SMALL_STEP:
            found += [
                self._choices("max_long_prefills", [1, 2, 4]),
                self._choices("long_step_share", [0.25, 0.5, 0.75, 1.0]),
            ]
        if workload.shares_prefixes and default.prefix_cache:
            found.append(self._choices("policy", ["fcfs", "longest-prefix"]))
        if may_refuse and slo.ttft is not None:
            found.append(self._choices("ttft_target_ms", [round(slo.ttft * share * 1e3, 1) for share in _LATENESS]))
        return found

    def _choices(self, name: str, values: Sequence[Value]) -> Dimension:
        """With the default in front; nothing to choose where the user has."""
        asked = getattr(self._asked.scheduler, name)
        settled = getattr(self.default.config, name)
        if self.is_given(name):
            return Dimension(name, (asked,))
        return Dimension(name, (asked, *(value for value in values if value != settled)))

    def is_given(self, name: str) -> bool:
        """Whether the user's own flags say something of the setting, which is kept."""
        return name in self._given


def flags_of(settings: Mapping[str, Value]) -> list[str]:
    """For the server's command line."""
    return [f"{OPTIONS[name].flag}={_shown(value)}" for name, value in settings.items()]


def _at_least(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _shown(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


SEARCHED = (
    "max_seqs",
    "max_step_tokens",
    "prefill_chunk",
    "max_itl_ms",
    "prefer",
    "kv_shortage",
    "long_prompt_tokens",
    "max_long_prefills",
    "long_step_share",
    "policy",
    "ttft_target_ms",
)
