"""The SDK's drill counts every end, and calls broken what may not be."""

import asyncio
import re
from argparse import Namespace
from pathlib import Path

import pytest

from ipc import AsyncClient, Completion
from ipc.messages import Failed
from tests.unit.ipc.fake_tokenizer import FakeTokenizer
from tools.drills.sdk import Endurance, prompt, references

OPTIONS = Namespace(requests=60, cancel_share=0.1, output_tokens=4, deadline=10.0, retries=2)
LOST = Failed(0, 500, "lost", "server_error")


def endure(endpoint: str, *, hang: bool = False, refusals: int = 0, wrong: bool = False) -> Endurance:
    async def main() -> Endurance:
        tokenizer = FakeTokenizer(endpoint)
        async with AsyncClient(endpoint) as client:
            expected: list[Completion] = await references(client, 4)
            if wrong:
                expected = expected[1:] + expected[:1]
            tokenizer.refusals = [LOST] * refusals
            endurance = Endurance(client, expected, Namespace(**{**vars(OPTIONS), "deadline": 0.3 if hang else 10.0}))
            if hang:
                tokenizer.on_message = lambda peer, message: None  # type: ignore[method-assign]
                tokenizer.router._on_message = tokenizer.on_message
            await endurance.first_part()
            await endurance.second_part()
        tokenizer.router.close()
        return endurance

    return asyncio.run(main())


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/sdk"


def test_every_request_is_counted_once(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    endurance = endure(endpoint, refusals=7)
    endurance.report()
    printed = capsys.readouterr().out
    counts = [
        int(line.split()[0]) for line in printed.splitlines() if line.startswith("  ") and line.split()[0].isdigit()
    ]
    assert sum(counts) == 60
    assert "7 ServerError: lost" in printed
    assert "differ from the undisturbed ones: 0; hanging: 0" in printed


def test_deadlines_are_typed_errors(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    endure(endpoint, hang=True).report()
    printed = capsys.readouterr().out
    found = re.search(r"^ +(\d+) cancelled by their caller$", printed, re.MULTILINE)
    cancelled = int(found[1]) if found else 0
    assert 1 <= cancelled <= 6  # as many as there is time for
    assert f"{60 - cancelled} DeadlineExceeded" in printed


def test_a_wrong_result_is_broken(endpoint: str) -> None:
    endurance = endure(endpoint, wrong=True)
    with pytest.raises(SystemExit, match="broken"):
        endurance.report()


def test_prompts_differ() -> None:
    assert len({prompt(number) for number in range(20)}) == 20
    assert prompt(0) == prompt(20)
