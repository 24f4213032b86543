"""Whether a server with one flag changed would start, by the launcher's own rules and what it found on the machine."""

from functools import cached_property

import msgspec

from config.machine import Machine
from config.memory_plan import MemoryPlan
from config.resolve import resolve
from config.schema import Config, ModelArch
from config.sources import ConfigError, Option, convert, options

_KEPT_FREE = 0.1  # of the machine's memory that was available: other programs' needs change


class LaunchCheck:
    """Of one command line, on one machine."""

    def __init__(self, asked: Config, arch: ModelArch, machine: Machine) -> None:
        """`asked`: what the user set, nothing filled in. `machine`: as it was before the engine took any of it."""
        self._asked = asked
        self._arch = arch
        self._machine = machine
        self._options: dict[str, Option] = {option.flag: option for option in options()}

    def plan_with(self, flag: str, value: str) -> MemoryPlan | None:
        """The memory plan with that flag changed; None where the launcher would refuse it, or it does not fit."""
        option = self._options[flag]
        try:
            changed = None if value == "none" and not option.choices else convert(option, flag, value)
            section = msgspec.structs.replace(getattr(self._asked, option.section), **{option.name: changed})
            asked = msgspec.structs.replace(self._asked, **{option.section: section})
            plan = resolve(asked, self._arch, self._machine).plan
        except ConfigError:
            return None
        return plan if plan.fits else None

    @cached_property
    def _plan(self) -> MemoryPlan:
        return resolve(self._asked, self._arch, self._machine).plan

    @property
    def most_kv_bytes(self) -> int:
        """Of a rank's KV pool: all that there is room for."""
        plan = self._plan
        if plan.gpu is not None:
            return max(0, plan.kv + plan.gpu.usable - plan.gpu_total)
        return plan.kv + self._free_bytes

    @property
    def most_host_kv_bytes(self) -> int:
        """Of a rank's host tier."""
        return self._plan.host_kv + self._free_bytes

    @property
    def _free_bytes(self) -> int:
        """Of the machine's memory beside the plan, for each rank."""
        plan = self._plan
        left = int((1 - _KEPT_FREE) * plan.memory_available) - plan.total
        return max(0, left // plan.tp)
