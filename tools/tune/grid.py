"""`--grid "max-seqs=8,32 max-step-tokens=128,512"`: combinations that are measured whatever is predicted of them."""

import itertools
import math
from collections.abc import Sequence

from config.sources import ConfigError, convert
from tools.tune.space import OPTIONS, SEARCHED, Value

_MOST = 64  # combinations


class GridError(ValueError):
    """A grid that cannot be measured; the text is one line for the user."""


def parse_grid(text: str) -> list[dict[str, Value]]:
    """All combinations of the values of each setting; GridError, a line for the user, when it is not that."""
    settings: dict[str, list[Value]] = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or not values:
            raise GridError(
                f"must be settings and their values, such as max-seqs=8,32 prefer=mixed,decode; not {part!r}"
            )
        if name not in SEARCHED:
            raise GridError(f"{name!r} is none of {', '.join(SEARCHED)}")
        if name in settings:
            raise GridError(f"{OPTIONS[name].flag} stands there twice; give all its values at once")
        settings[name] = _values(name, values.split(","))
    if not settings:
        raise GridError("must be settings and their values, such as max-seqs=8,32 prefer=mixed,decode")
    check_number(math.prod(len(values) for values in settings.values()))
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]


def check_number(combinations: int) -> None:
    """GridError where they are too many to be measured."""
    if combinations > _MOST:
        raise GridError(f"{combinations:,} combinations are more than {_MOST}, and each one takes as long as the trace")


def _values(name: str, texts: Sequence[str]) -> list[Value]:
    option = OPTIONS[name]
    try:
        found: list[Value] = [convert(option, option.flag, text) for text in texts]
    except ConfigError as error:
        raise GridError(str(error)) from None
    if len(set(found)) < len(found):
        raise GridError(f"{option.flag}: {','.join(texts)} has one value twice")
    return found
