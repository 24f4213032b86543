"""Vocabularies against the reference outputs and against transformers."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ipc.control import StartError
from ipc.messages import ChatMessage, ChatPrompt
from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary, sentencepiece_vocabulary
from tokenizer_proc.gguf_vocabulary import tokenizer_of
from tokenizer_proc.templates import TemplateRenderer
from tokenizer_proc.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="module")
def smollm(model_path: Path) -> Vocabulary:
    return load_vocabulary(model_path)


@pytest.fixture(scope="module")
def reference(shared_dir: Path) -> list[dict[str, Any]]:
    with (shared_dir / "reference" / "greedy.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_reference_prompts_give_the_reference_ids(smollm: Vocabulary, reference: list[dict[str, Any]]) -> None:
    assert smollm.chat_template is not None

    async def prompts() -> list[list[int]]:
        assert smollm.chat_template is not None
        renderer = TemplateRenderer(smollm.chat_template, smollm.special_tokens, 10.0)
        try:
            return [
                smollm.encode(
                    await renderer.render(ChatPrompt((ChatMessage("user", row["prompt"]),))), add_special_tokens=False
                )
                if row["kind"] == "chat"
                else smollm.encode(row["prompt"], add_special_tokens=True)
                for row in reference
            ]
        finally:
            await renderer.close()

    different = [
        row["id"] for row, ids in zip(reference, asyncio.run(prompts()), strict=True) if ids != row["prompt_ids"]
    ]
    assert different == []


@given(
    st.text(max_size=300)
    | st.lists(
        st.sampled_from([" " * 90, "\t", "<|im_start|>", "word", "\r\n\n", "é", "🙂", "\x04\x06" * 50, "\U00041234"]),
        max_size=30,
    ).map("".join)
)
def test_a_text_has_no_fewer_tokens_than_can_be_told_without_encoding(smollm: Vocabulary, text: str) -> None:
    assert smollm.least_tokens(text) <= len(smollm.encode(text, add_special_tokens=False))


def test_how_many_tokens_a_text_has_at_least_is_told_only_where_none_of_it_gets_lost(smollm: Vocabulary) -> None:
    assert smollm.least_tokens("word " * 10_000) > 500
    assert byte_level_vocabulary().least_tokens("word " * 10_000) > 500
    assert byte_level_vocabulary("qwen2").least_tokens("word " * 10_000) == 0, "composed characters are fewer"
    assert sentencepiece_vocabulary().least_tokens("word " * 10_000) == 0
    assert smollm.encode("\x04" * 10_000, add_special_tokens=False) == []
    assert smollm.least_tokens("\x04" * 10_000) == 0
    lacking = Vocabulary(tokenizer_of(metadata()))
    assert lacking.encode("ab" + "é" * 100, add_special_tokens=False) == [2]
    assert lacking.least_tokens("é" * 100) == 0


def test_encoding_lets_other_threads_run(smollm: Vocabulary) -> None:
    turns = 0
    encoding = threading.Thread(target=lambda: smollm.encode("word " * 100_000, add_special_tokens=False))
    encoding.start()
    while encoding.is_alive():
        turns += 1
    assert turns > 1000  # a thread that keeps the lock leaves the others a handful


def test_reference_outputs_decode_to_the_reference_text(smollm: Vocabulary, reference: list[dict[str, Any]]) -> None:
    for row in reference:
        detokenizer = smollm.detokenizer(row["prompt_ids"], skip_special_tokens=True)
        text = "".join(detokenizer.push(token) for token in row["output_ids"]) + detokenizer.flush()
        assert text == row["output_text"], row["id"]


def test_smollm_special_tokens(smollm: Vocabulary) -> None:
    assert smollm.size == 49152
    assert smollm.encode("<|im_start|>user", add_special_tokens=False) == [1, 4093]
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    # tokenizer.ggml.add_bos_token is false in this file.
    assert smollm.encode("Hi", add_special_tokens=True) == smollm.encode("Hi", add_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay 12345", ["I", "'ll", "Ġpay", "Ġ12345"]),
        # Llama 3: at most three digits together, contractions in any case, a space stays before letters only.
        ("llama-bpe", "I'LL pay 12345", ["I", "'LL", "Ġpay", "Ġ", "123", "45"]),
        # Qwen 2: each digit for itself.
        ("qwen2", "pay 123", ["pay", "Ġ", "1", "2", "3"]),
        ("tekken", "payDay 12", ["pay", "Day", "Ġ", "1", "2"]),
        ("default", "pay $12345", ["pay", "Ġ", "$", "123", "45"]),
    ],
)
def test_text_is_split_as_the_file_names_it(pre: str, text: str, pieces: list[str]) -> None:
    split = byte_level_vocabulary(pre).tokenizer.pre_tokenizer
    assert split is not None
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters() -> None:
    vocabulary = byte_level_vocabulary("qwen2")
    assert vocabulary.encode("e\u0301", add_special_tokens=False) == vocabulary.encode("é", add_special_tokens=False)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    vocabulary = sentencepiece_vocabulary()
    tokens = vocabulary.tokenizer.encode("hello world", add_special_tokens=False).tokens
    assert tokens == ["▁", "hello", "▁world"]
    assert vocabulary.tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    # llama.cpp adds the begin-of-sequence token where the file does not say otherwise.
    assert vocabulary.encode("hello", add_special_tokens=True)[0] == 1
    assert vocabulary.encode("hello", add_special_tokens=False)[0] != 1


def metadata(**changes: Any) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<s>", "</s>"],
        "token_type": [1, 1, 1, 3, 3],
        "merges": ["a b"],
        "bos_token_id": 3,
        "eos_token_id": 4,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [2]),
        ({"add_bos_token": True}, [3, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [3, 2, 4]),
        ({"pre": "llama-bpe"}, [3, 2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
    ],
)
def test_begin_and_end_of_sequence_tokens(changes: dict[str, Any], ids: list[int]) -> None:
    vocabulary = Vocabulary(tokenizer_of(metadata(**changes)))
    assert vocabulary.encode("ab", add_special_tokens=True) == ids
    assert vocabulary.encode("ab", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, ["'bert'", "tokenizer.ggml.model"]),
        ({"pre": "falcon"}, ["'falcon'", "tokenizer.ggml.pre"]),
        ({"merges": None}, ["tokenizer.ggml.merges"]),
        ({"merges": ["a z"]}, ["not consistent"]),
        ({"model": "llama", "scores": [0.0]}, ["5 tokens but 1 scores"]),
    ],
)
def test_an_unusable_gguf_vocabulary_says_why(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StartError) as caught:
        tokenizer_of(metadata(**changes))
    for word in words:
        assert word in str(caught.value)


def save(directory: Path, vocabulary: Vocabulary, **settings: Any) -> None:
    vocabulary.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_directory_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(
        tmp_path,
        byte_level_vocabulary(),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|start|>",
        eos_token={"content": "<|end|>", "__type": "AddedToken"},
        chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}"}],
    )
    ours = load_vocabulary(tmp_path)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in ("Hello there, hello!\n  12 €", "<|start|>user\nhello<|end|>", "漢字 🌶"):
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
    assert ours.chat_template == "{{ bos_token }}"
    assert ours.special_tokens["bos_token"] == theirs.bos_token == "<|start|>"
    assert ours.special_tokens["eos_token"] == theirs.eos_token == "<|end|>"


def test_jinja_file_comes_before_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, byte_level_vocabulary(), chat_template="from the configuration")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_vocabulary(tmp_path).chat_template == "from the file"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level_vocabulary().tokenizer.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_vocabulary(tmp_path).encode("abcdefgh", add_special_tokens=True)) == 8


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unusable_directory_says_why(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(StartError, match=r"model\.gguf"):
        load_vocabulary(tmp_path / "model.gguf")
