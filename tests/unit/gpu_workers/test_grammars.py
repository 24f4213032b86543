"""The matchers of rows: masks against an independent validator, rebuilding, and failures that stay with their row."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from config.grammar import TokenTable, write_token_table
from gpu_workers.grammar_engine import GrammarEngine
from gpu_workers.grammars import Grammars
from gpu_workers.sampling import TokenMask, sample
from ipc.codec import unpack_floats, unpack_ints
from ipc.engine_messages import NewRow
from tests.unit.gpu_workers.plans import new_row, spec
from tests.unit.gpu_workers.test_sampling_oracle import VOCAB, random_logits, simple_batch

WORDS = [b'{"', b'": ', b', "', b'"}', b'":', b"tru", b"alse", "зел".encode(), "ё".encode()[:1], b"12", b'"a"', b"]]"]
TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256)), *WORDS]
EOS, SIZE = 0, len(TOKENS)
SCHEMAS: list[Any] = [
    {"enum": ["red", "blue", "зелёный", 12, None, [1, "a"]]},
    {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/C"}},
        "required": ["c"],
        "$defs": {"C": {"enum": ["ё", 1]}},
    },
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "integer", "maximum": 3}]}, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 2},
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 2}, "b": {"type": ["null", "integer"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
]


def grammar_of(schema: Any) -> str:
    options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    lark = "start: %json " + json.dumps({**schema, "x-guidance": options})
    return json.dumps({"grammars": [{"lark_grammar": lark + '\n%llguidance {"no_forcing": true}\n'}]})


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f'start: /{pattern}/\n%llguidance {{"no_forcing": true}}\n'}]})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tokens"
    write_token_table(path, TokenTable(TOKENS, [EOS], [EOS]))
    return path


def row_of(row: int, grammar: str, outputs: list[int] | None = None) -> NewRow:
    return new_row(row, [7, 7, *(outputs or [])], [0], num_prompt=2, sampling=spec(grammar=grammar))


def allowed(grammars: Grammars, rows: list[int]) -> dict[int, list[int]]:
    """The tokens that may come next, of those of `rows` that are limited."""
    numbers = np.array(rows, dtype=np.int32)
    grammars.begin(numbers)
    mask = grammars.mask()
    if mask is None:
        return {}
    assert mask.limits.shape == (len(mask.rows), SIZE)
    assert np.isinf(mask.limits).all()
    return {rows[i]: np.flatnonzero(mask.limits[at] > 0).tolist() for at, i in enumerate(mask.rows.tolist())}


def take(grammars: Grammars, row: int, token: int) -> tuple[bool, str]:
    """Whether the row is complete now, and what failed."""
    completed, failed = grammars.take(np.array([row], dtype=np.int32), np.array([token]), np.arange(1))
    return completed == (0,), failed[0].message if failed else ""


class Matchers(RuleBasedStateMachine):
    """Rows come, go, lose their place and go on elsewhere; each takes any token that its mask allows."""

    path: Path

    @initialize()
    def start(self) -> None:
        self.grammars = Grammars(self.path, SIZE)
        self.rows: dict[int, tuple[int, list[int]]] = {}

    @rule(schema=st.integers(0, len(SCHEMAS) - 1), row=st.integers(0, 5))
    def arrive(self, schema: int, row: int) -> None:
        if row not in self.rows:
            self.rows[row] = (schema, [])
            self.grammars.add(row_of(row, grammar_of(SCHEMAS[schema])))

    @rule(row=st.integers(0, 5))
    def leave(self, row: int) -> None:
        if self.rows.pop(row, None) is not None:
            self.grammars.free([row])

    @rule(row=st.integers(0, 5), to=st.integers(0, 5))
    def preempt(self, row: int, to: int) -> None:
        if row in self.rows and (to == row or to not in self.rows):
            schema, outputs = self.rows.pop(row)
            before = allowed(self.grammars, [row])[row]
            self.grammars.free([row])
            self.rows[to] = (schema, outputs)
            self.grammars.add(row_of(to, grammar_of(SCHEMAS[schema]), outputs))
            assert allowed(self.grammars, [to])[to] == before

    @rule(data=st.data(), bias=st.sampled_from(["any", "end"]))
    def step(self, data: st.DataObject, bias: str) -> None:
        order = sorted(self.rows)
        if not order:
            return
        masks = allowed(self.grammars, order)
        assert sorted(masks) == order
        chosen = []
        for row in order:
            ends = [token for token in masks[row] if TOKENS[token] in (b"<eos>", b"}", b'"', b"]", b'"}')]
            chosen.append(data.draw(st.sampled_from(ends if bias == "end" and ends else masks[row])))
        completed, failed = self.grammars.take(np.array(order, dtype=np.int32), np.array(chosen), np.arange(len(order)))
        assert failed == ()
        for index, (row, token) in enumerate(zip(order, chosen, strict=True)):
            schema, outputs = self.rows[row]
            outputs.append(token)
            assert token != EOS or index in completed
            if index in completed:
                text = b"".join(TOKENS[token] for token in outputs if token != EOS).decode()
                jsonschema.Draft202012Validator(SCHEMAS[schema]).validate(json.loads(text))
                del self.rows[row]
                self.grammars.free([row])

    @invariant()
    def no_row_is_limited_that_has_no_grammar(self) -> None:
        if hasattr(self, "rows"):
            assert sorted(allowed(self.grammars, [0, 1, 2, 3, 4, 5])) == sorted(self.rows)


def test_any_path_through_the_masks_gives_valid_output(table: Path) -> None:
    Matchers.path = table
    case = Matchers.TestCase
    case.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


def test_a_whole_output_is_told_with_its_last_token(table: Path) -> None:
    grammars = Grammars(table, SIZE)
    grammars.add(row_of(3, regex("ab")))
    assert allowed(grammars, [3]) == {3: [1 + ord("a")]}
    assert take(grammars, 3, 1 + ord("a")) == (False, "")
    assert take(grammars, 3, 1 + ord("b")) == (True, "")
    assert allowed(grammars, [3]) == {}  # the step that was planned before: in vain
    assert take(grammars, 3, 1 + ord("z")) == (False, "")


def test_end_of_sequence_completes_what_could_go_on(table: Path) -> None:
    grammars = Grammars(table, SIZE)
    grammars.add(row_of(0, regex("a+"), [1 + ord("a")]))
    assert allowed(grammars, [0]) == {0: [EOS, 1 + ord("a")]}
    assert take(grammars, 0, EOS) == (True, "")


@pytest.mark.parametrize(
    "bad",
    [
        row_of(1, "no grammar at all"),
        row_of(1, regex("a"), [1 + ord("b")]),
        row_of(1, regex("a"), [1 + ord("a"), 1 + ord("a")]),
    ],
)
def test_a_failure_stays_with_its_row(table: Path, bad: NewRow) -> None:
    grammars = Grammars(table, SIZE)
    grammars.add(row_of(0, regex("a+")))
    grammars.add(bad)
    grammars.add(row_of(2, regex("b+")))
    assert set(allowed(grammars, [0, 1, 2, 4])) == {0, 2}
    ids = [1 + ord("a"), 1 + ord("x"), 1 + ord("b"), 5]
    completed, failed = grammars.take(np.array([0, 1, 2, 4], dtype=np.int32), np.array(ids), np.arange(4))
    assert completed == ()
    assert [failure.index for failure in failed] == [1]
    assert failed[0].message.startswith("grammar: ")
    assert set(allowed(grammars, [0, 1, 2])) == {0, 2}


def test_a_refused_token_and_an_impossible_one_fail_their_rows(table: Path) -> None:
    grammars = Grammars(table, SIZE)
    for row in range(2):
        grammars.add(row_of(row, regex("ab")))
    allowed(grammars, [0, 1])
    completed, failed = grammars.take(np.array([0, 1], dtype=np.int32), np.array([1 + ord("b"), -1]), np.arange(2))
    assert completed == ()
    assert [failure.index for failure in failed] == [0, 1]
    assert "allowed_token_ids" in failed[1].message


def test_no_token_table_fails_the_request_and_not_the_rank(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path / "none", SIZE)
    grammars.add(row_of(0, regex("a")))
    assert allowed(grammars, [0]) == {}
    assert take(grammars, 0, 1) == (False, "grammar: its matcher failed")


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


class PanickingEngine(GrammarEngine):
    """llguidance with a bug."""

    def matcher(self, grammar: str) -> Any:
        if "z" in grammar:
            raise Panic("in the constructor")
        return super().matcher(grammar)

    def bits(self, matchers: list[Any]) -> Any:
        raise Panic("in a mask")


def test_a_panic_in_the_library_fails_requests_and_not_the_rank(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_workers.grammar_engine.GrammarEngine", PanickingEngine)
    for pattern in ("z", "a"):
        grammars = Grammars(table, SIZE)
        grammars.add(row_of(0, regex(pattern)))
        assert allowed(grammars, [0]) == {}
        assert take(grammars, 0, 1) == (False, "grammar: its matcher failed")


def test_the_mask_decides_the_draw_and_not_the_log_probabilities() -> None:
    samplings = [spec(temperature=t, seed=5, logprobs=2) for t in (0.0, 1.0, 0.0, 1.0)]
    limits = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    limits[:, [3, 8, 900]] = np.inf
    logits = random_logits(4, 1)
    free_ids, free = sample(logits.clone(), simple_batch(samplings))
    ids, logprobs = sample(logits.clone(), simple_batch(samplings), TokenMask(np.array([1, 2]), limits))
    assert [ids[0], ids[3]] == [free_ids[0], free_ids[3]]
    assert ids[1] in (3, 8, 900)
    assert ids[2] == max((3, 8, 900), key=lambda token: float(logits[2, token]))
    expected = torch.log_softmax(logits, dim=-1)
    for row in range(4):
        found, without = logprobs[row], free[row]
        assert found is not None
        assert without is not None
        assert found.chosen == pytest.approx(float(expected[row, ids[row]]), abs=1e-5)
        assert unpack_ints(found.top_ids) == unpack_ints(without.top_ids)
        assert unpack_floats(found.top_values) == unpack_floats(without.top_values)


def test_a_masked_draw_follows_the_renormalised_distribution() -> None:
    """200 draws from three allowed tokens; chi-square with two degrees of freedom, p = 0.001 at 13.8."""
    limits = np.full((200, VOCAB), -np.inf, dtype=np.float32)
    limits[:, [3, 8, 900]] = np.inf
    logits = random_logits(1, 2).repeat(200, 1)
    batch = simple_batch([spec(temperature=1.0, seed=seed) for seed in range(200)])
    ids, _ = sample(logits.clone(), batch, TokenMask(np.arange(200), limits))
    weights = torch.softmax(logits[0, [3, 8, 900]], dim=-1).numpy()
    counts = np.array([(ids == token).sum() for token in (3, 8, 900)])
    assert counts.sum() == 200
    assert (((counts - 200 * weights) ** 2) / (200 * weights)).sum() < 13.8


def test_where_nothing_is_left_the_id_says_so_and_others_are_untouched() -> None:
    samplings = [spec(temperature=t, seed=5, banned=[3], min_tokens=1) for t in (1.0, 1.0, 0.0)]
    limits = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    limits[:, 3] = np.inf
    logits = random_logits(3, 1)
    free_ids, _ = sample(logits.clone(), simple_batch(samplings))
    ids, _ = sample(logits.clone(), simple_batch(samplings), TokenMask(np.array([0, 2]), limits))
    assert ids.tolist() == [-1, free_ids[1], -1]
