"""What the process that checks grammars and the one that runs them must agree on: tokens, and llguidance's limits."""

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

# Arguments of `llguidance.LLParserLimits`. The two of a step bound a mask to some 20 ms.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,  # symbols
    "max_items_in_row": 2_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each, for each row
    "verbose_errors": False,  # without the state and the grammar in each message
}

_FILE = "tokens.msgpack"


class TokenTable(Struct, frozen=True):
    """The model's tokens as bytes, in the form in which `llguidance.LLTokenizer` wants them.

    `tokens` has one entry for each row of the embedding, empty where the tokenizer has no such token. Special tokens
    are none of a grammar's text, whatever their own text is.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    is_tokenizer_wrapper: bool = True  # what llguidance knows the form by
    bos_token_id: int | None = None

    @property
    def eos_token_id(self) -> int | None:
        """One of them; without any, llguidance counts one more token, which no model has."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def __call__(self, text: str) -> list[int]:
        """llguidance would ask for the tokens of text that a grammar forces; ours leave that to the model."""
        raise RuntimeError("a grammar forces no text: the model chooses the tokens of all of it")


def token_table_path(run_dir: str) -> Path:
    """Where the token table of a run is, once somebody has asked for a grammar."""
    return Path(run_dir) / _FILE


def write_token_table(path: Path, table: TokenTable) -> None:
    """Write the file at once: whoever sees it sees all of it."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.msgpack.encode(table))
    partial.replace(path)


def read_token_table(path: Path) -> TokenTable:
    """OSError or msgspec.DecodeError when there is none to read."""
    return msgspec.msgpack.decode(path.read_bytes(), type=TokenTable)
