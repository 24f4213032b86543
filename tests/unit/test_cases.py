"""Every input that other servers got wrong has a test of its own, named by its id or telling it."""

import json
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Of features that are not there yet: other families of models, draft models.
LATER = {"B079", "B081", "B082", "B084", "B101"}


def test_every_case_has_a_test(shared_dir: Path) -> None:
    lines = (shared_dir / "cases" / "cases.jsonl").read_text().splitlines()
    ids = {json.loads(line)["id"] for line in lines}
    assert ids >= LATER
    texts = [file.read_text() for file in TESTS.rglob("test_*.py") if file != Path(__file__).resolve()]
    told = {f"B{number}" for text in texts for number in re.findall(r"[bB](\d{3})(?!\d)", text)}
    assert ids - told == LATER
