"""The model's vocabulary: text to token ids, ids to bytes, special tokens and the chat template.

Whether a text gets a begin-of-sequence token is the model's own choice and is kept in the tokenizer's post-processor:
`tokenizer.json` brings one; for GGUF see `tokenizer_proc.gguf_vocabulary`. `encode` applies it to plain prompts.
Rendered chat prompts are encoded without it, since templates write their special tokens themselves.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from config.gguf_file import GGUFFile
from ipc.control import StartError

from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .gguf_vocabulary import chat_template_of, special_tokens_of, tokenizer_of

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte in GPT-2's byte-level alphabet: printable Latin-1 is itself, the rest moves past 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return alphabet


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    """Names of the decoding steps of a `tokenizer.json`, sequences unfolded."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [name for step in decoder["decoders"] for name in _decoder_types(step)]
    return [str(decoder["type"])]


class Vocabulary:
    """A tokenizer and what belongs to it. Safe to use from several threads once built."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """`special_tokens` maps the names that templates use (`bos_token`, ...) to token texts."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._alphabet = byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else None
        steps = _decoder_types(json.loads(state) if state else None)
        self._byte_level = "ByteLevel" in steps
        self._sentencepiece = not self._byte_level and (
            "Metaspace" in steps or ("ByteFallback" in steps and "Replace" in steps)
        )
        vocabulary = tokenizer.get_vocab()
        known = {byte for char, byte in self._alphabet.items() if char in vocabulary}
        # Some vocabularies lack control characters; of each longer character they have one of these bytes at least.
        self._lost = [chr(byte) for byte in range(0x80) if byte not in known]
        all_else_stays = (
            self._byte_level
            and tokenizer.normalizer is None
            and not any(token.lstrip or token.rstrip for token in added.values())
            and known.issuperset(range(0x80, 0xC0))
        )
        # Characters of text that a token stands for at most; 0 where more than `_lost` of it may become no token.
        self._longest = max(map(len, vocabulary)) if all_else_stays else 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. Releases the GIL."""
        # Of the library's methods, only those for batches release it.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`. Releases the GIL."""
        return self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least, told without encoding it; 0 where that can't be told."""
        if not self._longest:
            return 0
        return (len(text) - sum(map(text.count, self._lost))) // self._longest

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token as it stands inside a text; empty for ids that the vocabulary does not have."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if token_id not in self._added and all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if self._sentencepiece:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace(_SPACE_MARK, " ").encode()
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def special_token_ids(self) -> dict[str, int]:
        """Special tokens by their text."""
        return {self._added[token_id]: token_id for token_id in sorted(self.special_ids)}

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, shown: Collection[str] = ()
    ) -> Detokenizer:
        """A new detokenizer for one choice that continues `prompt`; special tokens in `shown` are not skipped."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        if skip and shown:
            skip = skip.difference(self.tokenizer.token_to_id(token) for token in shown)
        if self._byte_level or self._sentencepiece:
            return ByteDetokenizer(self.token_bytes, skip)
        return WindowDetokenizer(
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False), context=prompt, skip=skip
        )


def load_vocabulary(model_path: Path) -> Vocabulary:
    """The vocabulary of a `.gguf` file or of a directory with `tokenizer.json`; StartError where there is none."""
    if model_path.is_dir():
        return _from_directory(model_path)
    try:
        metadata = GGUFFile(model_path).metadata
    except ValueError as error:
        raise StartError(str(error)) from error
    tokenizer = tokenizer_of(metadata)
    return Vocabulary(tokenizer, chat_template_of(metadata), special_tokens_of(metadata, tokenizer))


def _from_directory(directory: Path) -> Vocabulary:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise StartError(
            f"{directory} has no tokenizer.json. Save the model's fast tokenizer there (transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(DIRECTORY)) and start again."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise StartError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(directory / "tokenizer_config.json")
    special_tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special_tokens[name] = value
    return Vocabulary(tokenizer, _template_of_directory(directory, settings), special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} does not hold a JSON object.")
    return content


def _template_of_directory(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` where there is one, else the entry of tokenizer_config.json (of several, "default")."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
