"""How much of each prompt begins as an earlier one did: what a prefix cache without bounds would have found.

Counted from hashes of runs of blocks, each chained to those before it.
A collision costs a wrong count, and nothing else.
"""

from array import array
from collections import OrderedDict

_RUN_BLOCKS = 4
_MAX_RUNS = 128  # of one prompt: what comes behind them is not looked at
_MAX_KNOWN = 1 << 16


class Repeats:
    """Remembers the runs that were seen last."""

    def __init__(self, block_size: int) -> None:
        self._run = _RUN_BLOCKS * block_size
        self._known: OrderedDict[int, None] = OrderedDict()

    def take(self, tokens: "array[int]", namespace: str) -> int:
        """The leading tokens of this prompt that one before it had too, in whole runs; this one is remembered."""
        known = self._known
        run = self._run
        key = hash(namespace)
        repeated = 0
        for start in range(0, min(len(tokens) // run, _MAX_RUNS) * run, run):
            key = hash((key, tokens[start : start + run].tobytes()))
            if key in known:
                known.move_to_end(key)
                repeated = start + run
            else:
                known[key] = None
        while len(known) > _MAX_KNOWN:
            known.popitem(last=False)
        return min(repeated, len(tokens) - 1)
