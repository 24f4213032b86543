"""The examples of docs/sdk.md, run as they stand there against a real server."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc import Client
from ipc.key_files import key_line
from tests.e2e.server import REPOSITORY, SMALL, Server
from tests.key_files import make_key_file

GUIDE = (REPOSITORY / "docs" / "sdk.md").read_text()
SERVER_KEY = "the server's public key, 40 characters"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


class Guide:
    """A server with keys, and what stands for it in the guide."""

    def __init__(self, model_path: Path, folder: Path) -> None:
        self.folder = folder
        server_key = make_key_file(folder / "server.key").public.decode()
        make_key_file(folder / "stranger.key")
        (folder / "clients.txt").write_text(key_line(make_key_file(folder / "client.key").public, "search"))
        # The installed package is what the checkout calls ipc.
        (folder / "tokenmill_client").symlink_to(REPOSITORY / "ipc")
        self.server = Server(
            model_path,
            *SMALL,
            "--sdk-listen",
            "tcp://127.0.0.1:0",
            "--sdk-keys",
            str(folder / "clients.txt"),
            "--sdk-server-key",
            str(folder / "server.key"),
        )
        self.names = {
            "ipc:///run/user/1000/tokenmill.sock": self.server.said(r"ZeroMQ clients: (\S+?)\)?$"),
            "tcp://models.example.org:7000": self.server.said(r"SDK: (tcp://\S+?),"),
            SERVER_KEY: server_key,
        }

    def run(self, example: str) -> str:
        """What it prints."""
        for name, value in self.names.items():
            example = example.replace(name, value)
        done = subprocess.run(
            [sys.executable, "-c", example],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout


@pytest.fixture(scope="module")
def guide(model_path: Path) -> Iterator[Guide]:
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        guide = Guide(model_path, Path(folder))
        with guide.server:
            yield guide


# What each prints, in the order of the guide.
EXPECTED = (
    r"(?s).+ (stop|length) \d+\n\(\d+.*\d\)\n 4, 5, .*Once upon a time\n576\n-\d+\.\d+\n",
    r"(?s)-?\d.*\n(red|green)\n.+",
    r"(?s)20 answers over one connection\n.*Usage\(prompt_tokens=\d+, completion_tokens=\d+, cached_tokens=\d+\)\n",
    r"400 temperature temperature must be between 0 and 2\nthe deadline of 0.2 s passed before the answer was whole\n",
    r"(?s)True and it was computed once\n.*",
    r"(?s).*\nthe server does not know this client's key \(--sdk-keys\)\n",
)


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_an_example_runs_and_prints_what_it_should(guide: Guide, number: int) -> None:
    assert len(EXAMPLES) == len(EXPECTED)
    printed = guide.run(EXAMPLES[number])
    assert re.fullmatch(EXPECTED[number], printed), printed


def test_calls_outlive_a_killed_tokenizer_process(guide: Guide) -> None:
    """Its successor listens at the same port and knows the same keys."""
    address, server_key = guide.names["tcp://models.example.org:7000"], guide.names[SERVER_KEY]
    with Client(address, key=guide.folder / "client.key", server_key=server_key, deadline=60) as client:
        before = client.generate("1, 2, 3,", max_tokens=6, temperature=0)
        guide.server.child("tokenizer").kill()
        after = client.generate("1, 2, 3,", max_tokens=6, temperature=0)
        assert (after.text, after.usage.completion_tokens) == (before.text, 6)
