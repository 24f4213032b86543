"""GPUs by name, for plans made where there is none: `--plan-gpu`."""

from config.bytesize import format_size, parse_size
from config.machine import Gpu

_GIB = 1 << 30

# GiB as CUDA reports them, which is less than the name says, rounded down to halves; compute capability.
_CARDS = {
    "B200": (178.0, "sm_100"),
    "H200": (139.5, "sm_90"),
    "H100": (79.0, "sm_90"),
    "A100": (79.0, "sm_80"),
    "A100-40GB": (39.0, "sm_80"),
    "A10": (22.0, "sm_86"),
    "L40S": (44.0, "sm_89"),
    "L4": (22.0, "sm_89"),
    "RTX5090": (31.0, "sm_120"),
    "RTX4090": (23.5, "sm_89"),
    "RTX3090": (23.5, "sm_86"),
    "RTX4080": (15.5, "sm_89"),
    "RTX4060": (7.5, "sm_89"),
}


def cards() -> list[Gpu]:
    """All of the list, those with less memory first."""
    return [_card(name) for name in sorted(_CARDS, key=lambda name: _CARDS[name][0])]


def planned_gpu(text: str) -> Gpu:
    """The GPU that `--plan-gpu` means: one of the list, or any with so much memory. ValueError when it is neither."""
    name = text.strip().upper().replace(" ", "")
    if name in _CARDS:
        return _card(name)
    try:
        memory = parse_size(text)
    except ValueError:
        known = ", ".join(_CARDS)
        raise ValueError(f"{text!r} is neither a memory size such as 24GiB nor one of {known}") from None
    name = f"a GPU of {format_size(memory)}"
    return Gpu(name=name, total_bytes=memory, free_bytes=memory, capability="sm_80")


def _card(name: str) -> Gpu:
    size, capability = _CARDS[name]
    memory = int(size * _GIB)
    return Gpu(name=name, total_bytes=memory, free_bytes=memory, capability=capability)
