"""Grammars in their child process: what compiles, what is refused, and in which words."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import uvloop
from llguidance import LLMatcher, LLTokenizer

from config.grammar import read_token_table, write_token_table
from ipc.messages import Grammar
from ipc.validation import InvalidRequest
from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary, sentencepiece_vocabulary
from tokenizer_proc.child_frames import Done, Refused
from tokenizer_proc.grammar_child import Compiler
from tokenizer_proc.grammar_requests import Compile, Setup
from tokenizer_proc.grammars import GrammarCompiler, token_table

VOCABULARY = byte_level_vocabulary()
EOS = 265  # "<|end|>"
TABLE = token_table(VOCABULARY, VOCABULARY.size, (EOS,))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tokens"
    write_token_table(path, TABLE)
    return path


@pytest.fixture(scope="module")
def child(path: Path) -> Iterator[Compiler]:
    child = Compiler()
    assert child.answer(Setup(str(path), 20.0)) == Done("")
    return child


def matches(child: Compiler, kind: Any, source: str, text: str) -> bool:
    """Whether the compiled grammar takes `text` as a whole."""
    answer = child.answer(Compile(kind, source))
    assert isinstance(answer, Done), answer
    matcher = LLMatcher(LLTokenizer(TABLE, eos_token=[EOS]), answer.text, log_level=0)  # type: ignore[arg-type]
    ids = VOCABULARY.encode(text, add_special_tokens=False)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def refusal(child: Compiler, kind: Any, source: str) -> str:
    answer = child.answer(Compile(kind, source))
    assert isinstance(answer, Refused), answer
    return answer.message


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_object", "", ['{"a": 1, "b": [true, null]}', "{}", '{"a":1}'], ["[1]", "1", '{"a"', '{ "a": 1}']),
        ("regex", r"[a-c]{2}\d/x", ["ab1/x"], ["ab1", "abc/x", "ab1/xx"]),
        ("choice", '["зел\\"ёный", "red\\n", "re"]', ['зел"ёный', "red\n", "re"], ["red", "зел", "r"]),
        ("lark", 'start: "a" b\nb: /[0-9]+/', ["a12"], ["a", "12"]),
        ("lark", 'root ::= "yes" | "no"\n', ["yes", "no"], ["maybe"]),  # GBNF
        ("json_schema", "true", ["[1]", "null"], ["x"]),
        ("json_schema", '{"x-order": 1, "type": "integer", "minimum": -2}', ["-2", "77"], ["-3", "1.5"]),
    ],
)
def test_each_kind_matches_what_it_says(
    child: Compiler, kind: str, source: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not matches(child, kind, source, text)] == []
    assert [text for text in bad if matches(child, kind, source, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
        {"pattern": "^[a-z]+$", "maxLength": 3},
        {"type": "string", "format": "email", "maxLength": 8},
        {"type": "string", "pattern": "b", "minLength": 2, "maxLength": 3},
    ],
)
def test_b066_all_constraints_on_a_string_hold_together(child: Compiler, schema: dict[str, Any]) -> None:
    checker = jsonschema.FormatChecker()
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    texts = ["", "a", "ab", "abc", "abcd", "b", "aB", "ab1", "a@b.co", "a@b.comx", "a@example.com", "xxxb", "bb"]
    found = [text for text in texts if matches(child, "json_schema", json.dumps(schema), json.dumps(text))]
    wrong = [text for text in found if not validator.is_valid(text)]
    assert wrong == []
    assert found


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "object", "properties": {"a": {"type": "string", "maxlength": 3}}}, "'maxlength'"),
        ({"items": [{"allOf": [{"nullable": True}]}]}, "'nullable'"),
        ({"$defs": {"A": {"dependencies": {"a": ["b"]}}}}, "'dependencies'"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, ""),
        ({"$ref": "http://localhost/a.json"}, "not present"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        (False, "nothing"),
    ],
)
def test_b066_what_would_be_a_weaker_constraint_is_refused(child: Compiler, schema: Any, part: str) -> None:
    assert part in refusal(child, "json_schema", json.dumps(schema))


def test_names_of_properties_and_values_are_no_keywords(child: Compiler) -> None:
    schema = {
        "type": "object",
        "properties": {"nullable": {"enum": [{"maxlength": 1}]}, "not": {"const": "x", "default": {"y": 1}}},
        "required": ["nullable"],
        "additionalProperties": False,
    }
    assert matches(child, "json_schema", json.dumps(schema), '{"nullable": {"maxlength": 1}, "not": "x"}')


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(a|b", "invalid regex"),
        ("lark", "start: foo", 'at 1(8): unknown name: "foo"'),
        ("lark", "root ::= (", ""),
        ("lark", 'foo: "a"', "start"),
        ("lark", "start: <nope>", "unknown special token"),
        ("lark", f"start: <[{'9' * 5000}]>", ""),
        ("lark", r"start: /[^\d\D]/", "no output can match it"),
        ("regex", r"[^\d\D]", "no output can match it"),
        ("json_schema", '{"type": "string", "pattern": "^a", "format": "date"}', "Unsatisfiable"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json_schema", '{"multipleOf": "x"}', "Expected a number"),
        ("json_schema", '{"type": "integer", "multipleOf": 0}', "multipleOf must be above 0"),
        ("json_schema", '{"type": "integer", "minimum": 1e300}', "a minimum or maximum of a number is too large"),
        ("json_schema", '{"type": "integer", "maximum": -1e300}', "a minimum or maximum of a number is too large"),
        ("json_schema", '{"type": "number", "maximum": 1e300}', "a minimum or maximum of a number is too large"),
        ("json_schema", '{"type": "number", "minimum": 1e-300}', "more than 250 nested groups, or a minimum"),
        ("json_schema", f'{{"type": "string", "pattern": "{"(" * 251}a{")" * 251}"}}', "more than 250 nested groups"),
    ],
)
def test_a_broken_grammar_is_refused_in_llguidance_words(child: Compiler, kind: str, source: str, message: str) -> None:
    found = refusal(child, kind, source)
    assert message in found
    for internal in ("no_forcing", "NoExtension", "verbose", "EOS", "coerce", "f64", "SearchRegex", "Some(", "((("):
        assert internal not in found
    assert "::=" in source or "::=" not in found


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", f"start: {'<[' * 60_000}"),
        ("lark", f"start: {'<[1,' * 30_000}"),
        ("regex", f"({' ' * 100_000}"),
        ("json_schema", json.dumps({"pattern": f"({' ' * 100_000}", "type": "string"})),
    ],
)
def test_a_long_run_of_anything_is_refused_soon(child: Compiler, kind: str, source: str) -> None:
    """Where that took a minute, the child's alarm would end this process."""
    assert len(refusal(child, kind, source)) <= 503


@pytest.mark.parametrize(
    "source",
    ["<|end|>", '"a" <|end|>', "<[265]>", "<[2,260-265]>", "<[^264]>", "<[*]>", '"<|start|>" /<a>/ <|end|> // x'],
)
def test_a_grammar_must_not_name_the_end_of_sequence(child: Compiler, source: str) -> None:
    """The output would end with it wherever it stands, and be empty where it stands first."""
    assert "end-of-sequence" in refusal(child, "lark", f"start: {source}\n")


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("lark", 'start: "<|end|>" // <|end|>', "<|end|>"),
        ("lark", r"start: /<\|end\|>|<\[265\]>/", "<|end|>"),
        ("lark", 'start: %json {"const": "<|end|>"}', '"<|end|>"'),
        ("lark", 'start: "a" <[^265]> "b"', ""),
        ("regex", r"<\|end\|>", "<|end|>"),
        ("choice", '["<|end|>"]', "<|end|>"),
        ("json_schema", '{"const": "<|end|>"}', '"<|end|>"'),
    ],
)
def test_text_that_reads_like_the_end_of_sequence_is_text(child: Compiler, kind: Any, source: str, text: str) -> None:
    answer = child.answer(Compile(kind, source))
    assert isinstance(answer, Done), answer
    if text:
        matcher = LLMatcher(LLTokenizer(TABLE, eos_token=[EOS]), answer.text, log_level=0)  # type: ignore[arg-type]
        assert not matcher.validate_tokens([EOS])
        letters = [token_id for char in text for token_id in VOCABULARY.encode(char, add_special_tokens=False)]
        assert matcher.consume_tokens(letters)
        assert matcher.is_accepting()


def test_text_that_a_grammar_forces_is_left_to_the_model(child: Compiler) -> None:
    """Else llguidance would ask for the tokens of a million characters here."""
    assert isinstance(child.answer(Compile("regex", "(a{1000}){1000}")), Done)


@pytest.mark.parametrize("vocabulary", [byte_level_vocabulary(), sentencepiece_vocabulary()])
def test_the_token_table_spells_what_the_tokenizer_encodes(vocabulary: Any, tmp_path: Path) -> None:
    size = vocabulary.size + 7  # the embedding may have more rows than the tokenizer has tokens
    write_token_table(tmp_path / "t", token_table(vocabulary, size, (2, size + 1)))
    table = read_token_table(tmp_path / "t")
    assert len(table.tokens) == size
    assert table.tokens[-7:] == [b""] * 7
    assert table.eos_token_ids == [2]
    ids = vocabulary.encode("hello world", add_special_tokens=False)
    assert b"".join(table.tokens[token_id] for token_id in ids).strip() == b"hello world"
    assert {vocabulary.tokenizer.id_to_token(i) for i in table.special_token_ids} <= {
        *("<|start|>", "<|end|>", "<unk>", "<s>", "</s>")
    }


def test_without_an_end_of_sequence_token_whole_outputs_still_end() -> None:
    table = token_table(VOCABULARY, VOCABULARY.size, ())
    tokenizer = LLTokenizer(table)  # type: ignore[arg-type]
    assert tokenizer.vocab_size == VOCABULARY.size + 1
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("ab"), log_level=0)
    assert matcher.consume_tokens(VOCABULARY.encode("ab", add_special_tokens=False))
    assert matcher.is_stopped()


def run(path: Path, timeout: float, *grammars: Grammar) -> tuple[list[str], bool]:
    """What each grammar becomes, or the error; and whether the last one is known now."""

    async def main() -> tuple[list[str], bool]:
        compiler = GrammarCompiler(VOCABULARY, VOCABULARY.size, (EOS,), path, timeout)
        found = []
        try:
            for grammar in grammars:
                try:
                    found.append(await compiler.compile(grammar))
                except InvalidRequest as error:
                    found.append(f"{error.param}: {error.message}")
            return found, compiler.known(grammars[-1]) is not None
        finally:
            await compiler.close()

    return uvloop.run(main())


def test_only_what_the_child_was_asked_for_is_counted(tmp_path: Path) -> None:
    async def main() -> tuple[int, float]:
        compiler = GrammarCompiler(VOCABULARY, VOCABULARY.size, (EOS,), tmp_path / "tokens", 20.0)
        try:
            for source in ("a+", "a+", "(", "b+"):
                with contextlib.suppress(InvalidRequest):
                    await compiler.compile(Grammar("regex", source))
            return compiler.compiled, compiler.seconds
        finally:
            await compiler.close()

    compiled, seconds = uvloop.run(main())
    assert compiled == 3  # the second one was known
    assert seconds > 0


def test_what_compiled_is_kept_and_what_failed_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    good, bad = Grammar("regex", "a+"), Grammar("regex", "(")
    found, known = run(path, 20.0, good, bad, good)
    assert known
    assert found[0] == found[2]
    assert "start:" in found[0]
    assert found[1].startswith("grammar: grammar: invalid regex")
    assert read_token_table(path) == TABLE


def test_a_line_that_was_made_from_a_field_is_told_by_its_name(tmp_path: Path) -> None:
    source = 'start: a b\na: %json {"type": "string"}\nb: %json {"not": {}}\n'
    name, other = "tools[1].function.parameters", "tools[0].function.parameters"
    grammars = Grammar("lark", source, {3: name}), Grammar("lark", source, {2: other})
    (told, untold), _ = run(tmp_path / "tokens", 20.0, *grammars)
    assert told == f'{name}: {name}: Unimplemented keys: ["not"]'
    assert untold.startswith("grammar: grammar: at 3(")


def test_a_grammar_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    found, known = run(tmp_path / "tokens", 1e-5, Grammar("json_object", ""))
    assert "took longer than" in found[0]
    assert not known


def test_concurrent_requests_share_one_child(tmp_path: Path) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(VOCABULARY, VOCABULARY.size, (EOS,), tmp_path / "tokens", 20.0)
        grammars = [Grammar("regex", f"a{{{n}}}") for n in range(1, 6)]
        try:
            found = await asyncio.gather(*(compiler.compile(grammar) for grammar in grammars))
            assert [f"a{{{n}}}" in text for n, text in enumerate(found, 1)] == [True] * 5
            assert 0 < compiler.waited < compiler.seconds  # which counts the waiting too
            waited = compiler.waited
            await compiler.compile(Grammar("regex", "b"))  # alone
            assert compiler.waited - waited < compiler.seconds - waited
        finally:
            await compiler.close()

    uvloop.run(main())
