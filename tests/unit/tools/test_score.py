"""tools/score finds what is wrong in a reference, and nothing in one that the model itself has written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.gpu_workers.tiny import save_tiny
from tools.score import __main__ as command
from tools.score.model import load
from tools.score.reference import score_rows

PROMPTS = [[5, 17, 99], [3], list(range(40, 75))]


def reference_row(model: PreTrainedModel, name: str, prompt: list[int], count: int) -> dict[str, Any]:
    """Greedy output by transformers, with the columns of a reference file."""
    tokens, margins, top5 = list(prompt), [], []
    for _ in range(count):
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        values, ids = logprobs.topk(5)
        margins.append(float(values[0] - values[1]))
        top5.append(list(map(list, zip(ids.tolist(), values.tolist(), strict=True))))
        tokens.append(int(ids[0]))
    return {"id": name, "prompt_ids": prompt, "output_ids": tokens[len(prompt) :], "margins": margins, "top5": top5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def rows(model_dir: Path) -> list[dict[str, Any]]:
    oracle = save_tiny(model_dir)
    return [reference_row(oracle, f"R{index}", prompt, 12) for index, prompt in enumerate(PROMPTS)]


def run(model_dir: Path, rows: list[dict[str, Any]], path: Path) -> int:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return command.main(["--model", str(model_dir), "--reference", str(path), "--threads", "1"])


def test_a_reference_of_transformers_has_no_mismatch(
    model_dir: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_dir, rows, tmp_path / "rows.jsonl") == 0
    output = capsys.readouterr().out
    assert "rows without a mismatch above margin 0.001: 3 of 3" in output
    assert "rows with every token equal: 3 of 3; steps: 36" in output


def test_a_planted_token_is_found_where_it_was_planted(
    model_dir: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = json.loads(json.dumps(rows))
    right = planted[1]["output_ids"][-1]
    planted[1]["output_ids"][-1] = (right + 1) % 131
    planted[1]["margins"][-1] = 0.5
    assert run(model_dir, planted, tmp_path / "rows.jsonl") == 1
    output = capsys.readouterr().out
    assert f"mismatch R1 step 11: {right} for {(right + 1) % 131}, margin 0.5000" in output
    assert output.count("mismatch R") == 1
    assert "rows without a mismatch above margin 0.001: 2 of 3" in output


def test_a_close_call_may_go_either_way(model_dir: Path, rows: list[dict[str, Any]]) -> None:
    planted = json.loads(json.dumps(rows[1]))
    planted["output_ids"][-1] = (planted["output_ids"][-1] + 1) % 131
    planted["margins"][-1] = 0.0009
    result = score_rows(load(model_dir, "float32", 1), [planted], 0.001)
    assert (result.rows_ok, result.rows_equal, result.mismatches) == (1, 0, [])


def test_a_wrong_log_probability_shows_in_the_errors(model_dir: Path, rows: list[dict[str, Any]]) -> None:
    model = load(model_dir, "float32", 1)
    exact = score_rows(model, rows, 0.001)
    assert len(exact.errors) == 3 * 12 * 5
    assert max(exact.errors) < 1e-4
    planted = json.loads(json.dumps(rows))
    planted[2]["top5"][4][3][1] += 0.25
    errors = sorted(score_rows(model, planted, 0.001).errors)
    assert errors[-1] == pytest.approx(0.25, abs=1e-4)
    assert errors[-2] < 1e-4


@pytest.mark.parametrize(("text", "problem"), [("", "no rows"), ("{", "line 1 column")])
def test_a_reference_that_cannot_be_used_is_reported(
    text: str,
    problem: str,
    model_dir: Path,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    assert command.main(["--model", str(model_dir), "--reference", str(tmp_path / "rows.jsonl")]) == 2
    assert problem in capsys.readouterr().err


def test_a_missing_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert command.main(["--model", str(tmp_path / "no"), "--reference", str(tmp_path / "rows.jsonl")]) == 2
    assert "no such directory or .gguf file" in capsys.readouterr().err
