"""Memory sizes in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bytesize import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("512MiB", 512 * 1024**2),
        ("4GiB", 4 * 1024**3),
        ("4 gib", 4 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 * 1024**4),
        ("7b", 7),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1.GiB", "4 G i B", "1e9", "nan", "0", "0.1b", "٣GiB", "4PB"])
def test_what_is_no_size_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory size|more than zero"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (100 * 1024**2, "100 MiB"), (15 * 1024**3, "15.0 GiB")],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 1 << 45))
def test_what_is_shown_reads_back_within_a_percent(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= 0.01 * size


def test_absurd_sizes_are_no_numbers_of_bytes() -> None:
    with pytest.raises(ValueError, match="400 digits"):
        parse_size("9" * 400 + "GiB")
