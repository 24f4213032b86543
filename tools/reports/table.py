"""Tables as text."""

from collections.abc import Sequence

Rows = list[tuple[str, list[str]]]  # name and values


def seconds(value: float | None) -> str:
    """With a fitting unit; a dash for what n does not support."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 1000 else f"{value:,.0f} s"


def render(labels: Sequence[str], rows: Rows) -> str:
    """Columns aligned, names left and values right."""
    lines = [("", list(labels)), *rows]
    name_width = max(len(name) for name, _ in lines)
    widths = [max(len(values[column]) for _, values in lines) for column in range(len(labels))]
    return "\n".join(
        "  ".join(
            [name.ljust(name_width)] + [value.rjust(width) for value, width in zip(values, widths, strict=True)]
        ).rstrip()
        for name, values in lines
    )
