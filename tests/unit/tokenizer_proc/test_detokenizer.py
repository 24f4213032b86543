"""Incremental decoding against one-shot decoding."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece

from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary, sentencepiece_vocabulary
from tokenizer_proc.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from tokenizer_proc.vocabulary import Vocabulary

# Tokens that cut characters of 1 to 4 bytes everywhere, plus bytes that are never valid.
PIECES = [
    b"a",
    b" ",
    b" the",
    *[bytes([byte]) for char in "é€漢🌶" for byte in char.encode()],
    "€".encode()[:2],
    "🌶".encode()[1:],
    "🌶".encode()[:3],
    "漢字".encode(),
    b"\xff",
    b"\xc0",
    b"\xed\xa0\x80",
    b"",
]


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_deltas_concatenate_to_the_one_shot_decode(ids: list[int]) -> None:
    detokenizer = ByteDetokenizer(PIECES.__getitem__)
    assert "".join(deltas(detokenizer, ids)) == b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


@given(st.text(max_size=30), st.data())
def test_valid_text_never_shows_a_replacement_character(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=20)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    got = deltas(ByteDetokenizer(pieces.__getitem__), list(range(len(pieces))))
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in got)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # An incomplete character followed by a space is proven invalid; what is left of it is invalid by itself.
        ([b"\xe6\xbc", b" x", b"\xa2"], ["", "\ufffd x", "\ufffd", ""]),
        ([b"\xe6\xbc", b"\xa2", b" x"], ["", "漢", " x", ""]),
        ([b"\xf0\x9f", b"\x8c", b"\xb6"], ["", "", "🌶", ""]),
        ([b"ok\xf0\x9f"], ["ok", "\ufffd"]),
        # Table 3-8 of the Unicode standard: maximal subparts, one replacement each.
        ([b"a\xf1\x80\x80\xe1\x80\xc2b\x80c\x80\xbfd"], ["a\ufffd\ufffd\ufffdb\ufffdc\ufffd\ufffdd", ""]),
    ],
)
def test_b012_pending_and_invalid_bytes(pieces: list[bytes], expected: list[str]) -> None:
    assert deltas(ByteDetokenizer(pieces.__getitem__), list(range(len(pieces)))) == expected


def test_b009_choices_do_not_share_state() -> None:
    pieces = [b"\xf0\x9f", b"\x8c\xb6"]
    one, two = ByteDetokenizer(pieces.__getitem__), ByteDetokenizer(pieces.__getitem__)
    assert [one.push(0), two.push(0), one.push(1), two.push(1)] == ["", "", "🌶", "🌶"]


@pytest.mark.parametrize("build", [byte_level_vocabulary, sentencepiece_vocabulary])
def test_b011_a_prompt_that_ends_inside_a_character_is_not_replayed(build: Callable[[], Vocabulary]) -> None:
    vocabulary = build()
    tokens = vocabulary.encode("Hello 🌶 hello", add_special_tokens=False)
    start = next(i for i, token in enumerate(tokens) if vocabulary.token_bytes(token).endswith(b"\xf0"))
    prompt, output = tokens[: start + 1], tokens[start + 1 :]
    text = "".join(deltas(vocabulary.detokenizer(prompt, skip_special_tokens=True), output))
    # The three bytes that follow the prompt's half character are no character of their own.
    assert text == "\ufffd\ufffd\ufffd hello"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_equals_the_tokenizer_on_valid_text(text: str) -> None:
    vocabulary = byte_level_vocabulary()
    ids = vocabulary.encode(text, add_special_tokens=False)
    got = "".join(deltas(vocabulary.detokenizer([], skip_special_tokens=False), ids))
    assert got == vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(["hello", " world", "é", "漢", "🌶", " ", "\n"]), min_size=1, max_size=12).map("".join))
def test_sentencepiece_equals_the_tokenizer_after_a_prompt(text: str) -> None:
    vocabulary = sentencepiece_vocabulary()
    prompt = vocabulary.encode("hello", add_special_tokens=False)
    ids = vocabulary.encode("hello" + text, add_special_tokens=False)[len(prompt) :]
    whole = vocabulary.tokenizer.decode(prompt + ids, skip_special_tokens=False)
    got = "".join(deltas(vocabulary.detokenizer(prompt, skip_special_tokens=False), ids))
    assert got == whole[len(vocabulary.tokenizer.decode(prompt, skip_special_tokens=False)) :]


def test_special_tokens_are_skipped_when_asked() -> None:
    vocabulary = byte_level_vocabulary()
    ids = vocabulary.encode("hello<|end|>hello", add_special_tokens=False)
    end = vocabulary.tokenizer.token_to_id("<|end|>")
    assert end in ids
    assert end in vocabulary.special_ids
    assert "".join(deltas(vocabulary.detokenizer([], skip_special_tokens=True), ids)) == "hellohello"
    assert "".join(deltas(vocabulary.detokenizer([], skip_special_tokens=False), ids)) == "hello<|end|>hello"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    vocabulary = byte_level_vocabulary()
    first, second = vocabulary.encode("é", add_special_tokens=False)
    end = vocabulary.tokenizer.token_to_id("<|end|>")
    assert deltas(vocabulary.detokenizer([], skip_special_tokens=True), [first, end, second]) == ["", "", "é", ""]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    # Embeddings are often padded to more rows than the tokenizer has tokens.
    vocabulary = byte_level_vocabulary()
    assert deltas(vocabulary.detokenizer([], skip_special_tokens=True), [vocabulary.size + 5]) == ["", ""]


@pytest.fixture(scope="module")
def wordpiece() -> Vocabulary:
    words = ["[UNK]", "[CLS]", "un", "##believ", "##able", "story", "##s", "a", "."]
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = WordPieceDecoder(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[CLS]", special=True)])
    return Vocabulary(tokenizer)


@given(prompt=st.lists(st.integers(2, 8), max_size=12), ids=st.lists(st.integers(2, 8), min_size=1, max_size=40))
def test_other_decoders_go_through_a_window(wordpiece: Vocabulary, prompt: list[int], ids: list[int]) -> None:
    detokenizer = wordpiece.detokenizer(prompt, skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    before = wordpiece.tokenizer.decode(prompt)
    assert "".join(deltas(detokenizer, ids)) == wordpiece.tokenizer.decode(prompt + ids)[len(before) :]
