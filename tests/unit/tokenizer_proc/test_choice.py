"""How one choice turns rows into text, usage and an end."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from ipc.codec import pack_floats, pack_ints, unpack_ints
from ipc.engine_messages import RawLogprobs, RowOutput
from ipc.messages import ChoiceTimings, Delta, Finished, FinishReason, SamplingParams, Timings
from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary
from tokenizer_proc.choice import LOOP_STOP_REASON, Choice, Preparation, Progress

VOCABULARY = byte_level_vocabulary()
END = VOCABULARY.tokenizer.token_to_id("<|end|>")
PREPARATION = Preparation(1e9, 1.0, 2.0)
EARLY = ChoiceTimings(3.0, 4.0, 5.0, 0.0, 3, 1, b"starts", b"ends", b"tokens")  # two chunks without a token, one with


def token(text: str) -> int:
    (token_id,) = VOCABULARY.encode(text, add_special_tokens=False)
    return token_id


def row(
    *ids: int,
    finish: FinishReason | None = None,
    stop_token: int | None = None,
    cached: int = 0,
    logprobs: tuple[RawLogprobs, ...] = (),
    timings: ChoiceTimings | None = None,
) -> RowOutput:
    return RowOutput(1, pack_ints(ids), finish, stop_token, cached, logprobs, timings=timings)


class Run:
    """Feeds rows and collects what comes out."""

    def __init__(self, params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        self.choice = Choice(7, 2, prompt, params, VOCABULARY, PREPARATION)
        self.deltas: list[Delta] = []
        self.finished: Finished | None = None
        self.stops_early = False

    def take_plain(self, *ids: int) -> "Run":
        for token_id in ids:
            if self.finished is None:
                self._note(self.choice.take_plain(token_id))
        return self

    def _note(self, progress: Progress) -> None:
        if progress.delta is not None:
            self.deltas.append(progress.delta)
        self.finished, self.stops_early = progress.finished, progress.stops_early

    def take(self, *rows: RowOutput) -> "Run":
        for one in rows:
            if self.finished is not None:
                break
            self._note(self.choice.take(one))
        return self

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in unpack_ints(delta.token_ids)]

    @property
    def logprob_tokens(self) -> list[str]:
        return [entry.chosen.token for delta in self.deltas for entry in delta.logprobs]


def test_length_finish_counts_every_token() -> None:
    run = Run(SamplingParams()).take(row(token("hello"), cached=2), row(token("h")), row(token("a"), finish="length"))
    assert run.text == "helloha"
    assert run.finished == Finished(7, 2, "length", None, 3, 3, 2)
    assert not run.stops_early
    assert all((delta.request_id, delta.index) == (7, 2) for delta in run.deltas)


def test_end_of_sequence_counts_and_has_no_text() -> None:
    params = SamplingParams(skip_special_tokens=False)
    run = Run(params).take(row(token("hello")), row(END, finish="stop", stop_token=END))
    assert run.text == "hello"
    assert run.token_ids == [token("hello"), END]
    assert run.finished == Finished(7, 2, "stop", None, 3, 2, 0)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ahello")])
def test_named_stop_token(include: bool, text: str) -> None:
    stop = token("hello")
    params = SamplingParams(stop_token_ids=(stop,), include_stop_str_in_output=include)
    run = Run(params).take(row(token("a")), row(stop, finish="stop", stop_token=stop))
    assert run.text == text
    assert run.finished is not None
    assert (run.finished.reason, run.finished.stop_reason, run.finished.completion_tokens) == ("stop", stop, 2)


def test_b001_stop_inside_a_token_ends_with_that_token() -> None:
    run = Run(SamplingParams(stop=("DE",))).take(row(token("a")), row(token("DEF")), row(token("b")))
    assert run.text == "a"
    assert run.finished == Finished(7, 2, "stop", "DE", 3, 2, 0)
    assert run.stops_early
    assert run.token_ids == [token("a"), token("DEF")]


def test_b003_text_before_the_stop_in_its_token() -> None:
    assert Run(SamplingParams(stop=("\n",))).take(row(VOCABULARY.tokenizer.token_to_id("?Ċ"))).text == "?"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aDE")])
def test_b007_include_stop_string(include: bool, text: str) -> None:
    params = SamplingParams(stop=("DE",), include_stop_str_in_output=include)
    assert Run(params).take(row(token("a")), row(token("DEF"))).text == text


@pytest.mark.parametrize("rows", [
    (row(token("DEF"), finish="length"),),
    (row(token("DE"), token("a"), finish="length"),),
    (row(token("DE"), END, finish="stop", stop_token=END),),
])  # fmt: skip
def test_a_stop_string_overrides_the_finish_that_comes_with_it(rows: tuple[RowOutput, ...]) -> None:
    run = Run(SamplingParams(stop=("DE",))).take(*rows)
    assert run.finished is not None
    assert (run.finished.reason, run.finished.stop_reason, run.finished.completion_tokens) == ("stop", "DE", 1)
    assert not run.stops_early  # the scheduler has ended it by itself


def test_held_text_is_released_at_the_end() -> None:
    run = Run(SamplingParams(stop=("DEX",))).take(row(token("DE")), row(END, finish="stop", stop_token=END))
    assert [delta.text for delta in run.deltas] == ["DE"]
    assert run.finished is not None
    assert run.finished.stop_reason is None


def test_an_incomplete_character_becomes_one_replacement_at_the_end() -> None:
    first = VOCABULARY.encode("🌶", add_special_tokens=False)[:2]
    assert Run(SamplingParams()).take(row(*first), row(finish="length")).text == "\ufffd"


def test_stop_strings_wait_for_min_tokens() -> None:
    params = SamplingParams(stop=("DE",), min_tokens=2)
    run = Run(params).take(row(token("DE")), row(token("a")), row(token("DE")))
    assert run.text == "DEa"
    assert run.finished is not None
    assert run.finished.completion_tokens == 3


def raw(value: float) -> RawLogprobs:
    return RawLogprobs(value, pack_ints([token("a"), token("h")]), pack_floats([value, value - 1]))


def test_logprobs_have_token_text_and_bytes() -> None:
    pepper = VOCABULARY.encode("🌶", add_special_tokens=False)
    run = Run(SamplingParams(logprobs=2)).take(
        row(token("hello"), logprobs=(raw(-0.5),)), row(pepper[0], finish="length", logprobs=(raw(-1.0),))
    )
    entries = [entry for delta in run.deltas for entry in delta.logprobs]
    assert [(e.chosen.token, e.chosen.token_bytes, e.chosen.logprob) for e in entries] == [
        ("hello", b"hello", -0.5),
        ("\ufffd", b"\xf0", -1.0),
    ]
    assert [(alternative.token, alternative.logprob) for alternative in entries[0].top] == [("a", -0.5), ("h", -1.5)]


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_count_characters_of_the_text(skip: bool) -> None:
    """Not bytes, and nothing for special tokens that have no text."""
    pieces = [token("a"), *VOCABULARY.encode("é", add_special_tokens=False), END]
    pieces += [*VOCABULARY.encode("🌶", add_special_tokens=False), token("h")]
    run = Run(SamplingParams(logprobs=0, skip_special_tokens=skip))
    run.take(*(row(one, logprobs=(raw(-1.0),)) for one in pieces), row(finish="length"))
    special = "" if skip else "<|end|>"
    assert run.text == f"aé{special}🌶h"
    data = b""
    for entry in (entry for delta in run.deltas for entry in delta.logprobs):
        whole = data.decode("utf-8", "ignore")  # the characters that are complete before this token
        assert entry.offset == len(whole)
        data += b"" if skip and entry.chosen.token_id == END else entry.chosen.token_bytes
    assert data.decode() == run.text


def test_logprobs_do_not_tell_a_held_stop_string() -> None:
    run = Run(SamplingParams(logprobs=2, stop=("DEFh",)))
    run.take(row(token("a"), logprobs=(raw(-1.0),)), row(token("DEF"), logprobs=(raw(-2.0),)))
    assert run.logprob_tokens == ["a"]
    run.take(row(token("h"), logprobs=(raw(-3.0),)))
    assert run.logprob_tokens == ["a"]
    assert run.token_ids == [token("a"), token("DEF"), token("h")]


def test_held_logprobs_come_with_their_text() -> None:
    run = Run(SamplingParams(logprobs=2, stop=("DEFh",)))
    run.take(row(token("DEF"), logprobs=(raw(-2.0),)), row(token("a"), logprobs=(raw(-3.0),)))
    assert [(delta.text, len(delta.logprobs)) for delta in run.deltas] == [("DEFa", 2)]


@pytest.mark.parametrize(
    "bad",
    [
        RowOutput(1, b"abc"),
        row(1, 2, logprobs=(raw(-1.0),)),
        row(1, logprobs=(RawLogprobs(-1.0, pack_ints([1, 2]), pack_floats([1.0])),)),
    ],
)
def test_columns_that_do_not_fit_are_refused(bad: RowOutput) -> None:
    with pytest.raises(ValueError):
        Run(SamplingParams()).take(bad)


LETTERS = [token(letter) for letter in "abDE\n"] + [token("DE"), token("DEF"), END]


@given(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=20),
    st.lists(st.sampled_from(["DE", "a", "EF", "ab", "F\n"]), max_size=2),
    st.integers(1, 5),
)
def test_the_answer_does_not_depend_on_how_tokens_are_grouped(ids: list[int], stops: list[str], group: int) -> None:
    params = SamplingParams(stop=tuple(stops))
    one_by_one = Run(params).take(*(row(token_id) for token_id in ids), row(finish="length"))
    groups = [ids[start : start + group] for start in range(0, len(ids), group)]
    grouped = Run(params).take(*(row(*some) for some in groups), row(finish="length"))
    assert (grouped.text, grouped.finished, grouped.token_ids) == (
        one_by_one.text,
        one_by_one.finished,
        one_by_one.token_ids,
    )
    assert one_by_one.finished is not None
    assert len(one_by_one.token_ids) == one_by_one.finished.completion_tokens
    assert not any(stop in one_by_one.text for stop in stops)


_stops = st.lists(st.sampled_from(["a", "ab", "llo h", "é", "\U0001f336", "xyz"]), max_size=3).map(tuple)


@given(
    st.lists(st.sampled_from(["hello", " h", "a", "b", "é", "\N{HOT PEPPER}"]), max_size=12).map("".join),
    st.lists(st.integers(0, VOCABULARY.size + 1), max_size=5),
    _stops,
    st.booleans(),
    st.integers(0, 4),
)
@example("hello hello", [], ("llo h",), False, 0)  # a part of a token is held back
def test_plain_tokens_mean_the_same_as_rows(
    text: str, more: list[int], stop: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    ids = [*VOCABULARY.encode(text, add_special_tokens=False), *more]
    end = row(finish="length")
    as_rows = Run(params).take(*(row(token_id) for token_id in ids), end)
    as_plain = Run(params).take_plain(*ids).take(end)
    assert as_plain.deltas == as_rows.deltas
    assert as_plain.finished == as_rows.finished
    assert as_plain.stops_early == as_rows.stops_early
    mixed = Run(params)
    for at, token_id in enumerate(ids):
        if at % 2:
            mixed.take(row(token_id))
        else:
            mixed.take_plain(token_id)
    assert mixed.take(end).deltas == as_rows.deltas


def test_a_loop_ends_the_choice_with_all_of_its_text() -> None:
    a, b = token("A"), token("B")
    run = Run(SamplingParams(stop=("AC",), stop_token_ids=(b,)))
    run.take(row(a, b)).take(RowOutput(1, pack_ints([a, b, a]), "stop", loop=True))
    assert run.text == "ABABA", "neither the last token nor what a stop string held back is cut"
    assert run.token_ids == [a, b, a, b, a]
    assert run.finished is not None
    assert (run.finished.reason, run.finished.stop_reason) == ("stop", LOOP_STOP_REASON)
    assert (run.finished.completion_tokens, run.stops_early) == (5, False)


def test_a_stop_string_within_a_loop_is_the_reason() -> None:
    run = Run(SamplingParams(stop=("BA",))).take(
        RowOutput(1, pack_ints([token("A"), token("B"), token("A")]), "stop", loop=True)
    )
    assert run.text == "A"
    assert run.finished is not None
    assert run.finished.stop_reason == "BA"


def timings_of(run: Run) -> Timings:
    assert run.finished is not None
    assert run.finished.timings is not None
    return run.finished.timings


def test_timings_are_the_schedulers_at_its_own_end() -> None:
    """Those of the end, also where it had told some before, and also where a stop string stands in the last token."""
    end = ChoiceTimings(3.0, 4.0, 5.0, 6.0, 9, 1)
    for params, last in [
        (SamplingParams(), "a"),
        (SamplingParams(stop=("DE",)), "a"),
        (SamplingParams(stop=("DE",)), "DEF"),
    ]:
        run = Run(params).take(row(timings=EARLY)).take_plain(token("hello"))
        run.take(row(token(last), finish="length", timings=end))
        timings = timings_of(run)
        assert (timings.scheduler, timings.clock_offset, timings.received, timings.tokenized) == (end, 1e9, 1.0, 2.0)
        assert not run.stops_early


@pytest.mark.parametrize("more", [0, 1, 5])
def test_timings_of_a_stop_string_are_what_the_scheduler_told_and_the_tokens_since(more: int) -> None:
    before = time.monotonic()
    run = Run(SamplingParams(stop=("DE",))).take(row(timings=EARLY, cached=2)).take_plain(*[token("hello")] * more)
    run.take_plain(token("DEF"))
    timings = timings_of(run)
    assert run.stops_early
    assert before <= timings.scheduler.last_token <= timings.finished <= time.monotonic()
    last, steps = timings.scheduler.last_token, EARLY.steps + more
    assert timings.scheduler == structs.replace(EARLY, last_token=last, steps=steps)
    assert run.finished is not None
    assert run.finished.cached_tokens == 2


def test_a_preempted_request_is_told_of_again() -> None:
    """Tokens before the later report are among its steps."""
    later = structs.replace(EARLY, steps=20, preemptions=2)
    run = Run(SamplingParams(stop=("DE",))).take(row(timings=EARLY)).take_plain(*[token("hello")] * 4)
    run.take(row(timings=later)).take_plain(token("hello"), token("DEF"))
    assert (timings_of(run).scheduler.steps, timings_of(run).scheduler.preemptions) == (21, 2)


def test_no_timings_without_the_schedulers() -> None:
    run = Run(SamplingParams(stop=("DE",))).take(row(token("DEF")))
    assert run.finished is not None
    assert run.finished.timings is None
