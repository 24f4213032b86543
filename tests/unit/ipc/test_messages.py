"""What the wire must do for every message: round trips, additions, and refusal of what does not fit."""

from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import engine_messages, messages, stats_messages
from ipc.codec import Decoder, encode, pack_floats, pack_ints, unpack_floats, unpack_ints
from ipc.engine_messages import StepResult
from ipc.messages import Abort, Generate, SamplingParams, TextPrompt, ToTokenizer

decode: Decoder[ToTokenizer] = Decoder(ToTokenizer)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integer_columns_round_trip(values: list[int]) -> None:
    assert list(unpack_ints(pack_ints(values))) == values
    assert len(pack_ints(values)) == 4 * len(values)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float_columns_round_trip(values: list[float]) -> None:
    assert list(unpack_floats(pack_floats(values))) == values


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_integers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_ints([value])


def test_a_column_cut_in_the_middle_of_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        unpack_ints(b"\0\0\0")


def test_messages_round_trip_through_their_union() -> None:
    message = Generate(7, TextPrompt("é"), SamplingParams(stop=("x",), logit_bias={3: -1.5}), "id", "tenant")
    assert decode(encode(message)) == message
    assert decode(encode(Abort(3))) == Abort(3)


def test_a_reader_understands_a_message_without_its_later_fields() -> None:
    older = msgspec.msgpack.encode(["Generate", 7, ["TextPrompt", "x"], ["SamplingParams", 5]])
    assert decode(older) == Generate(7, TextPrompt("x"), SamplingParams(max_tokens=5))


def test_times_of_older_event_logs_are_read_as_what_they_are() -> None:
    older = msgspec.msgpack.encode(["StepResult", 1, b"", [], 10, 20, 30])
    assert Decoder(StepResult)(older) == StepResult(1, b"", (), prepare_us=10, forward_us=20, sample_us=30)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        encode(Abort(1))[:-1],
        msgspec.msgpack.encode(["Nothing", 1]),
        msgspec.msgpack.encode(["Abort", "x"]),
    ],
)
def test_what_does_not_fit_the_union_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body)


@pytest.mark.parametrize("module", [messages, engine_messages, stats_messages])
def test_every_message_is_frozen_and_tagged(module: ModuleType) -> None:
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message:
            config = kind.__struct_config__
            assert config.frozen, name
            assert config.array_like, name
            assert config.tag == kind.__name__
