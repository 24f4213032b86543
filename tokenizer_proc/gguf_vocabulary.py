"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

The file names the kind of vocabulary (`tokenizer.ggml.model`) and, for byte-level BPE, how text is split before merging
(`tokenizer.ggml.pre`); the patterns belong to the names and are not in the file. Begin- and end-of-sequence tokens are
added to plain prompts as `add_bos_token` and `add_eos_token` say; without these entries, SentencePiece vocabularies and
Llama 3 get a begin-of-sequence token and others do not, which is what llama.cpp does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Prepend
from tokenizers.normalizers import Replace as ReplaceText
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from tokenizers.pre_tokenizers import PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as SplitSequence
from tokenizers.processors import TemplateProcessing

from ipc.control import StartError

# Token types of the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name in the file -> patterns, applied one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    # llama.cpp splits off each digit first. No merge of this vocabulary contains a digit, so that changes only runs of
    # several spaces before one; transformers, which made the reference outputs, does not do it for a GGUF file.
    "smollm": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")  # a word that is a token is taken whole, before any merge


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise StartError(f"The GGUF file has no {key}: it carries no usable vocabulary.")
    return metadata[key]


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes; StartError naming the type where it is not supported."""
    kind = _required(metadata, "tokenizer.ggml.model")
    tokens: Sequence[str] = _required(metadata, "tokenizer.ggml.tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    pre = metadata.get("tokenizer.ggml.pre", "default")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(tokens, _required(metadata, "tokenizer.ggml.merges"), pre)
        elif kind == "llama":
            tokenizer = _sentencepiece(
                tokens,
                _required(metadata, "tokenizer.ggml.scores"),
                int(metadata.get("tokenizer.ggml.unknown_token_id", 0)),
                bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            )
        else:
            raise StartError(
                f"The GGUF file's vocabulary is of type {kind!r} (tokenizer.ggml.model); supported are 'gpt2' "
                "(byte-level BPE) and 'llama' (SentencePiece BPE)."
            )
    except StartError:
        raise
    except Exception as error:  # the library raises bare Exception for every kind of bad vocabulary
        raise StartError(f"The GGUF file's vocabulary is not consistent: {error}") from error
    special = [tokens[index] for index, value in enumerate(types) if value in (_UNKNOWN, _CONTROL)]
    own = [tokens[index] for index, value in enumerate(types) if value == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    _frame(tokenizer, metadata, adds_bos=kind == "llama" or pre in _LLAMA3_NAMES)
    return tokenizer


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    if pre not in _PATTERNS:
        raise StartError(
            f"The GGUF file splits text as {pre!r} (tokenizer.ggml.pre), which is not supported; known are "
            f"{', '.join(sorted(_PATTERNS))}. A directory with tokenizer.json works for every model."
        )
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    tokenizer.pre_tokenizer = SplitSequence([*splits, ByteLevelSplit(add_prefix_space=False, use_regex=False)])
    if pre == "qwen2":
        tokenizer.normalizer = NFC()
    tokenizer.decoder = ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], scores: Sequence[float], unknown: int, space_prefix: bool) -> Tokenizer:
    """SentencePiece BPE has no merge list: any two neighbours that form a token merge, best score first."""
    if len(scores) != len(tokens):
        raise StartError(f"The GGUF file has {len(tokens)} tokens but {len(scores)} scores.")
    if not 0 <= unknown < len(tokens):
        raise StartError(f"The GGUF file's unknown_token_id is {unknown}, but it has {len(tokens)} tokens.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((score, left, right))
    merges.sort(key=lambda merge: merge[0], reverse=True)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = ReplaceText(" ", _SPACE_MARK)
    tokenizer.normalizer = NormalizerSequence([Prepend(_SPACE_MARK), spaces]) if space_prefix else spaces
    tokenizer.decoder = DecoderSequence([Replace(_SPACE_MARK, " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def _token_at(metadata: Mapping[str, Any], tokenizer: Tokenizer, name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if index is None else tokenizer.id_to_token(index)


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, adds_bos: bool) -> None:
    """Let `encode` put the begin- and end-of-sequence tokens around a plain prompt where the model wants them."""
    pieces: list[str] = ["$A"]
    used: list[tuple[str, int]] = []
    bos, eos = _token_at(metadata, tokenizer, "bos"), _token_at(metadata, tokenizer, "eos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        pieces.insert(0, bos)
        used.append((bos, metadata["tokenizer.ggml.bos_token_id"]))
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        pieces.append(eos)
        used.append((eos, metadata["tokenizer.ggml.eos_token_id"]))
    if used:
        tokenizer.post_processor = TemplateProcessing(single=pieces, special_tokens=used)


def chat_template_of(metadata: Mapping[str, Any]) -> str | None:
    """The Jinja source of the chat template, if the file has one."""
    template = metadata.get("tokenizer.chat_template")
    return None if template is None else str(template)


def special_tokens_of(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Texts of the special tokens under the names that chat templates use."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    texts = {template_name: _token_at(metadata, tokenizer, name) for name, template_name in names.items()}
    return {name: text for name, text in texts.items() if text is not None}
