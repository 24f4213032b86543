"""Limits on a request's latencies, and whether it met them."""

from msgspec import Struct

from tools.loadgen.latencies import Latencies

_UNITS = {"ms": 1e-3, "s": 1.0}
SLO_HELP = "ttft=500ms,tpot=50ms,itl=100ms,e2e=10s"


class Slo(Struct, frozen=True):
    """Seconds; None: no such limit. All that are given must be met.

    `itl` is met when 99% of the request's own inter-token latencies are (of fewer than 100, all).
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def met(self, found: Latencies) -> bool:
        """Of a request that was answered. What it does not have, as TPOT of one token, it cannot miss; what the server
        does not tell, it misses.
        """
        return self.is_known(found) and all(value <= limit for limit, value in self._limited(found))

    def is_known(self, found: Latencies) -> bool:
        """Whether the server tells enough of its tokens to judge the request."""
        if self.tpot is not None and found.tokens is None:
            return False
        return self.itl is None or len(found.itl) > 0 or not len(found.icl)

    def strain(self, found: Latencies) -> float:
        """The largest of its latencies as a share of its limit: above 1 where the SLO is missed."""
        return max((value / limit for limit, value in self._limited(found)), default=0.0)

    def _limited(self, found: Latencies) -> list[tuple[float, float]]:
        """Limits and what is held against them."""
        pairs = (self.ttft, found.ttft), (self.tpot, found.tpot), (self.itl, found.worst_itl), (self.e2e, found.e2e)
        return [(limit, value) for limit, value in pairs if limit is not None and value is not None]


def parse_slo(text: str) -> Slo:
    """Of `SLO_HELP`; ValueError with a line for the user, without the flag's name."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
        try:
            number = float(value.removesuffix(unit)) if unit else float("nan")
        except ValueError:
            number = float("nan")
        if name not in Slo.__struct_fields__ or not 0 < number < float("inf") or name in limits:
            known = ", ".join(Slo.__struct_fields__)
            raise ValueError(f"must be limits such as {SLO_HELP}: of {known}, in ms or s, each once; not {text!r}")
        limits[name] = number * _UNITS[unit]
    return Slo(**limits)
