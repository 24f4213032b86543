"""Perplexity is that of transformers and torch; texts are read and cut as they should be."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel

from gpu_workers.weights.loader import open_source
from tests.unit.gpu_workers.tiny import save_tiny
from tools.score import __main__ as command
from tools.score.model import load, load_exact
from tools.score.perplexity import Likelihood, Scorer, ratio, token_losses
from tools.score.texts import pieces, read_texts

PIECES = [[5, 17, 99, 3, 3, 64], list(range(40, 75)), [2, 9], [7] * 200]


def save_words(path: Path, size: int = 131) -> None:
    """A tokenizer whose token i is the word "w<i>"; other words are token 0."""
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def words(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def loss_sum(oracle: PreTrainedModel, ids: list[int]) -> float:
    """Of the tokens after the first, by transformers."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return float(oracle(tokens, labels=tokens).loss) * (len(ids) - 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> PreTrainedModel:
    save_words(model_dir)
    return save_tiny(model_dir)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_perplexity_is_that_of_transformers(model_dir: Path, oracle: PreTrainedModel, kernels: str) -> None:
    scorer = Scorer(load(model_dir, "float32", 1, kernels), 200)
    for piece in PIECES:
        scorer.score(piece)
    likelihood = scorer.likelihood
    assert likelihood.tokens == [5, 34, 1, 199]
    assert likelihood.sums == pytest.approx([loss_sum(oracle, piece) for piece in PIECES], rel=1e-4)
    mean = sum(loss_sum(oracle, piece) for piece in PIECES) / 239
    assert likelihood.mean == pytest.approx(mean, rel=1e-4)
    assert likelihood.perplexity == pytest.approx(math.exp(mean), rel=1e-3)


def test_the_command_tokenizes_cuts_and_compares(
    model_dir: Path, oracle: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = list(range(1, 51))
    rows = [
        {"input": words(long[:20]), "output": words(long[20:])},
        {"input": words(long), "output": ""},  # the same text, but for the white space
        {"input": "", "output": ""},
        {"text": words([99, 98, 97])},
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", str(model_dir), "--text", str(file), "--threads", "1", "--length", "32", "--against-torch"]
    assert command.main(arguments) == 0
    output = capsys.readouterr().out
    expected = [loss_sum(oracle, long[:32]), loss_sum(oracle, long[32:]), loss_sum(oracle, [99, 98, 97])]
    assert "50 tokens scored, in 3 pieces of up to 32 of 4 texts" in output
    means = [float(value) for value in re.findall(r"log-likelihood ([\d.]+)", output)]
    assert means == pytest.approx([sum(expected) / 50] * 2, rel=1e-4)
    [value] = re.findall(r"ratio of the perplexities ([\d.]+)", output)
    assert float(value) == pytest.approx(1.0, abs=2e-4)


def test_exact_weights_are_what_the_file_says(model_path: Path) -> None:
    """The output projection of the first layer, through the identity."""
    source = open_source(model_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    quantized = source.read_quantized(name)
    assert quantized is not None
    layer = load_exact(model_path, 1)
    linear = layer._layers[0].output  # the only way to see what was loaded
    result = layer.backend.linear(torch.eye(quantized.shape[1]), linear)
    assert torch.equal(result.T, quantized.dequantize())
    assert not torch.equal(result.T, source.read(name).float())


def test_the_ratio_and_its_error_are_those_of_paired_pieces() -> None:
    one, other = Likelihood(), Likelihood()
    for mine, theirs in (([1.0, 2.0], [1.0, 1.0]), ([3.0], [3.5]), ([0.5, 0.5, 0.5], [0.5, 0.25, 0.5])):
        one.add(mine)
        other.add(theirs)
    value, error = ratio(one, other)
    difference = (7.5 - 6.75) / 6
    assert value == pytest.approx(math.exp(difference))
    # differences of 1, -0.5 and 0.25 in pieces of 2, 1 and 3 tokens
    squares = (1 - 2 * difference) ** 2 + (-0.5 - difference) ** 2 + (0.25 - 3 * difference) ** 2
    assert error == pytest.approx(math.exp(difference) * math.sqrt(squares * 3 / 2) / 6)
    assert ratio(one, one) == (1.0, 0.0)


def test_the_error_covers_what_other_pieces_would_have_given() -> None:
    generator = torch.Generator().manual_seed(4)

    def drawn() -> tuple[float, float]:
        one, other = Likelihood(), Likelihood()
        for index in range(60):
            theirs = torch.rand(5 + index % 7, generator=generator, dtype=torch.float64)
            shift = 0.1 * torch.randn(1, generator=generator, dtype=torch.float64)
            one.add((theirs + shift).tolist())
            other.add(theirs.tolist())
        return ratio(one, other)

    results = torch.tensor([drawn() for _ in range(200)], dtype=torch.float64)
    assert float(results[:, 1].mean()) == pytest.approx(float(results[:, 0].std()), rel=0.2)


def test_losses_do_not_depend_on_the_rows_taken_together() -> None:
    values = torch.randn(300, 40, generator=torch.Generator().manual_seed(2))
    targets = [index % 40 for index in range(300)]
    expected = F.cross_entropy(values.double(), torch.tensor(targets), reduction="none")
    assert token_losses(values, targets) == pytest.approx(expected.tolist(), rel=1e-5)


TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=8)


@given(TEXTS, st.integers(2, 12), st.one_of(st.none(), st.integers(1, 60)))
@example([[0, 0], [1, 0, 0, 0, 0, 0, 1, 0, 0]], 3, 6)
def test_pieces_are_parts_of_the_texts_within_all_limits(texts: list[list[int]], length: int, most: int | None) -> None:
    joined = [" ".join(map(str, text)) for text in texts]
    found = pieces(joined, lambda text: [int(word) for word in text.split()], length, most)
    whole = {tuple(text[start : start + length]) for text in texts for start in range(0, len(text), length)}
    whole = {piece for piece in whole if len(piece) > 1}
    assert len({tuple(piece) for piece in found}) == len(found)
    scored = sum(len(piece) - 1 for piece in found)
    if most is None or most >= sum(len(piece) - 1 for piece in whole):
        assert {tuple(piece) for piece in found} == whole
    else:
        assert scored <= most
        assert {tuple(piece) for piece in found[:-1]} <= whole, "only the last one is cut"
        assert all(len(piece) >= 2 for piece in found)


def test_other_files_are_one_text(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text('{"text": "a"}\nb\n')
    assert read_texts(file) == ['{"text": "a"}\nb\n']


def test_lines_become_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"input": "a", "output": "b"}\n{"input": "", "output": "b"}\n\n{"text": "c\u2028d"}\n')
    assert read_texts(file) == ["a\nb", "b", "c\u2028d"]


@pytest.mark.parametrize("line", ["{", "[]", '{"input": "a"}', '{"text": 3}', '{"input": "a", "output": null}'])
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2: not "):
        read_texts(file)


def test_what_cannot_be_scored_is_reported(
    model_dir: Path, oracle: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    common = ["--model", str(model_dir), "--text", str(file), "--threads", "1"]
    assert command.main(common) == 2
    assert "No such file" in capsys.readouterr().err
    file.write_text("w1")
    assert command.main(common) == 2
    assert "no text in this file has two tokens" in capsys.readouterr().err
    file.write_text(words([1] * 300))
    assert command.main([*common, "--length", "300"]) == 2
    assert "--length 300: this model takes at most 256 tokens" in capsys.readouterr().err
    larger = tmp_path / "larger"
    larger.mkdir()
    save_tiny(larger)
    save_words(larger, 140)
    file.write_text(words([1, 139, 2]))
    assert command.main([*common[2:], "--model", str(larger)]) == 2
    assert "knows token 139, but the model has only 131" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--reference", "x", "--tokens", "3"], ["--text", "x", "--length", "1"], []])
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--model", "x", *arguments])
    assert stopped.value.code == 2
    assert "--" in capsys.readouterr().err.splitlines()[-1]
