"""GPUs by name, for plans made where there is none: `--plan-gpu`."""

import re

from msgspec import Struct

from config.bytesize import format_size, parse_size
from config.machine import Gpu

_GIB = 1 << 30
_LEAST_MEMORY = _GIB  # no GPU with kernels here has less: it is a number that lacks its unit

# What names have besides the model and its memory, as drivers and shops write them: maker, form, kind of memory.
_MAKER = r"(?:NVIDIA|GEFORCE|TESLA)*"
_FORM = r"(?:SXM[2-6]?|PCIE|HBM[23]?E?)*"


class _Card(Struct, frozen=True):
    model: str
    memory: int  # in GB, as the name says it
    gib: float  # GiB as CUDA reports them, which is less, rounded down to halves
    capability: str


_CARDS = (
    _Card("B200", 192, 178.0, "sm_100"),
    _Card("H200", 141, 139.5, "sm_90"),
    _Card("H100", 80, 79.0, "sm_90"),
    _Card("A100", 80, 79.0, "sm_80"),
    _Card("A100", 40, 39.0, "sm_80"),
    _Card("A10", 24, 22.0, "sm_86"),
    _Card("L40S", 48, 44.0, "sm_89"),
    _Card("L4", 24, 22.0, "sm_89"),
    _Card("RTX5090", 32, 31.0, "sm_120"),
    _Card("RTX4090", 24, 23.5, "sm_89"),
    _Card("RTX3090", 24, 23.5, "sm_86"),
    _Card("RTX4080", 16, 15.5, "sm_89"),
    _Card("RTX4060", 8, 7.5, "sm_89"),
)


def cards() -> list[Gpu]:
    """All of the list, those with less memory first."""
    return [_gpu(card) for card in sorted(_CARDS, key=lambda card: card.gib)]


def planned_gpu(text: str) -> Gpu:
    """The GPU that `--plan-gpu` means: one of the list, or any with so much memory. ValueError when it is neither.

    In names, case, spaces and dashes mean nothing; memory, maker and form may be there: "NVIDIA A100-SXM4-80GB".
    """
    squeezed = re.sub(r"[\s_-]", "", text).upper()
    meant = [card for card in _CARDS if _is_name(squeezed, card)]
    if len(meant) > 1:
        raise ValueError(f"{text!r} may be any of {', '.join(map(_name, meant))}: say which")
    if meant:
        return _gpu(meant[0])
    try:
        memory = parse_size(text)
    except ValueError:
        known = ", ".join(map(_name, _CARDS))
        raise ValueError(f"{text!r} is neither a memory size such as 24GiB nor one of {known}") from None
    if memory < _LEAST_MEMORY:
        named = [f", or {_name(card)}" for card in _CARDS if card.model == f"RTX{squeezed}"]
        raise ValueError(
            f"{text!r} means {format_size(memory)}, less than any GPU has; write a size with its unit, such as 24GiB"
            + "".join(named)
        )
    return Gpu(name=f"a GPU of {format_size(memory)}", total_bytes=memory, free_bytes=memory, capability="sm_80")


def _is_name(squeezed: str, card: _Card) -> bool:
    return bool(re.fullmatch(f"{_MAKER}{card.model}{_FORM}(?:{card.memory}GI?B?{_FORM})?", squeezed))


def _name(card: _Card) -> str:
    alone = sum(other.model == card.model for other in _CARDS) == 1
    return card.model if alone else f"{card.model}-{card.memory}GB"


def _gpu(card: _Card) -> Gpu:
    memory = int(card.gib * _GIB)
    return Gpu(name=_name(card), total_bytes=memory, free_bytes=memory, capability=card.capability)
