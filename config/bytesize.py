"""Memory sizes as people write and read them."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MOST_DIGITS = 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes meant by a text such as "512MiB", "1.5 GB" or "1048576"; ValueError when it is none, or zero."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a memory size such as 512MiB, 4GiB or 1.5GB")
    if len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"a memory size of {len(match[1])} digits is none that any machine has")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"{text!r} is not more than zero bytes")
    return size


def format_size(size: float) -> str:
    """Bytes with three significant digits and a binary unit: 1536 -> "1.50 KiB"."""
    if size < 1024:
        return f"{size:.0f} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000 or unit == "TiB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
