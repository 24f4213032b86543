"""Small vocabularies of both common kinds, made the way a GGUF file describes them."""

from functools import cache

from tokenizer_proc.gguf_vocabulary import tokenizer_of
from tokenizer_proc.vocabulary import Vocabulary, byte_level_alphabet

CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def byte_level_vocabulary(pre: str = "gpt-2", template: str | None = CHATML) -> Vocabulary:
    """Every byte, a few merges, and the special tokens `<|start|>` and `<|end|>`."""
    letters = list(byte_level_alphabet())
    merged = ["he", "ll", "llo", "hello", "Ġh", "DE", "DEF", "?Ċ"]
    merges = ["h e", "l l", "ll o", "he llo", "Ġ h", "D E", "DE F", "? Ċ"]
    special = ["<|start|>", "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*letters, *merged, *special],
        "tokenizer.ggml.token_type": [1] * (len(letters) + len(merged)) + [3] * len(special),
        "tokenizer.ggml.merges": merges,
    }
    return Vocabulary(tokenizer_of(metadata), template)


@cache
def sentencepiece_vocabulary() -> Vocabulary:
    """Byte fallback for every byte and a few pieces; the best-scored merge has the highest score."""
    pieces = [*"helowrd▁\n", "he", "ll", "llo", "hello", "▁w", "or", "▁wor", "ld", "▁world"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Vocabulary(tokenizer_of(metadata))
