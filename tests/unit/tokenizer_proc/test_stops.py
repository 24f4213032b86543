"""Stop strings against a naive search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.stops import StopMatcher

# Two letters make overlapping, self-overlapping and nested stop strings likely.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
CHUNKS = st.lists(st.text("abc", max_size=6), max_size=12)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first prefix of the text that ends in a stop string decides; the longest stop string there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(CHUNKS, STOPS, st.booleans())
def test_equals_the_naive_cut_for_any_chunking(chunks: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown = ""
    fed = ""
    text, stop = naive("".join(chunks), stops, include)
    for chunk in chunks:
        fed += chunk
        shown += matcher.push(chunk)
        assert text.startswith(shown)
        if matcher.matched is None:
            # Exactly the text that could still become a stop string is missing.
            held = 0
            if not include:
                held = max(
                    (n for s in stops for n in range(1, len(s)) if fed.endswith(s[:n])),
                    default=0,
                )
            assert shown == fed[: len(fed) - held]
    shown += matcher.flush()
    assert (shown, matcher.matched) == (text, stop)


def test_b001_stop_inside_a_larger_token() -> None:
    matcher = StopMatcher(["DE"])
    assert matcher.push(" ABC") == " ABC"
    assert matcher.push("CDEF") == "C"
    assert matcher.matched == "DE"


def test_b002_no_prefix_of_a_later_stop_leaks() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(token) for token in ("ABC", "DEF", "GH", "I", "JKL")] == ["ABC", "", "", "", ""]
    assert matcher.matched == "DEFGHIJ"


def test_b002_released_once_the_match_is_impossible() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(token) for token in ("DEF", "GX", "DE")] == ["", "DEFGX", ""]
    assert matcher.flush() == "DE"
    assert matcher.matched is None


def test_b003_text_before_the_stop_in_the_same_token_is_delivered() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("?\n") == "?"
    assert matcher.matched == "\n"


@pytest.mark.parametrize("stops", [[""], ["", ""]])
def test_b006_empty_stops_are_ignored(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.push("text") == "text"
    assert matcher.matched is None


@pytest.mark.parametrize(("include", "text"), [(True, "One."), (False, "One")])
def test_b007_include_stop_str_in_output(include: bool, text: str) -> None:
    matcher = StopMatcher(["."], include)
    assert matcher.push("One") + matcher.push(". Two.") == text


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("ab") == "a"
    assert (matcher.push("more"), matcher.flush()) == ("", "")
