"""Reading API keys: files of digests, and the environment."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.api_keys import ApiKey, is_api_key, key_line, read_api_keys
from config.sources import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
# SHA-256 of "abc": FIPS 180-2, appendix B.1.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_lines_comments_and_names(tmp_path: Path) -> None:
    file = key_file(tmp_path, f"# ours\n\nsha256:{ABC} team-a\n  sha256:{ABC.upper()}\t b.2 \nsha256:{'0' * 64}\n")
    found = read_api_keys(file, {})
    digest = bytes.fromhex(ABC)
    assert found.keys == (ApiKey(digest, "team-a"), ApiKey(digest, "b.2"), ApiKey(bytes(32), "0" * 16))
    assert found.warnings == ()


def test_keys_of_the_environment_join_those_of_the_file(tmp_path: Path) -> None:
    file = key_file(tmp_path, f"sha256:{ABC} a\n")
    found = read_api_keys(file, {"TOKENMILL_API_KEYS": "abc, a-key-that-nobody-guesses"})
    assert found.keys[1] == ApiKey(bytes.fromhex(ABC), ABC[:16])
    assert found.keys[2].digest == hashlib.sha256(b"a-key-that-nobody-guesses").digest()
    assert ["can be guessed" in warning for warning in found.warnings] == [True]


def test_without_either_there_are_none() -> None:
    assert read_api_keys("", {}).keys == ()


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("sk-a-plain-key", 1),
        (f"sha256:{ABC}\nsha256:abc", 2),
        (f"# x\n\nsha256:{ABC} two names", 3),
        (f"sha256:{ABC} " + "n" * 65, 1),
        (f"md5:{ABC}", 1),
        (f"{ABC} name", 1),
    ],
)
def test_a_bad_line_is_told_by_number_and_not_shown(tmp_path: Path, line: str, number: int) -> None:
    file = key_file(tmp_path, line + "\n")
    with pytest.raises(
        ConfigError, match=rf"^--api-key-file {re.escape(file)}, line {number}: expected sha256:"
    ) as told:
        read_api_keys(file, {})
    assert "plain-key" not in str(told.value)


def test_files_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="Is a directory"):
        read_api_keys(str(tmp_path), {})
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(key_file(tmp_path, "# nothing\n"), {})
    (tmp_path / "keys").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_api_keys(str(tmp_path / "keys"), {})


@pytest.mark.parametrize("text", ["", " ", "a,,b", "a b", "é", "a\x00", "k" * 513])
def test_a_variable_that_is_set_must_hold_keys(text: str) -> None:
    # An empty one would open the server to everybody, by a secret that failed to arrive.
    with pytest.raises(ConfigError, match=r"^TOKENMILL_API_KEYS: expected keys") as told:
        read_api_keys("", {"TOKENMILL_API_KEYS": text})
    assert not text.strip() or text not in str(told.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    found = read_api_keys(key_file(tmp_path, f"sha256:{ABC}\n", mode), {})
    assert any("everybody on this machine can read it" in warning for warning in found.warnings) == warned


@given(st.from_regex(r"[\x21-\x2b\x2d-\x7e]{1,60}", fullmatch=True), st.from_regex(r"[a-z._-]{0,9}", fullmatch=True))
def test_a_line_that_was_made_is_read(tmp_path_factory: pytest.TempPathFactory, key: str, name: str) -> None:
    assert is_api_key(key)
    file = key_file(tmp_path_factory.mktemp("keys"), key_line(key, name))
    (found,) = read_api_keys(file, {}).keys
    assert found.digest == hashlib.sha256(key.encode()).digest()
    assert found.tenant == (name or found.digest.hex()[:16])


def keys_command(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.keys", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, input=given, capture_output=True, text=True, check=False, env=os.environ
    )


def test_the_command_makes_a_line_from_stdin() -> None:
    done = keys_command("team-a", given="abc\n")
    assert (done.returncode, done.stdout) == (0, f"sha256:{ABC} team-a\n")
    assert "can be guessed" in done.stderr
    assert keys_command(given="abc").stdout == f"sha256:{ABC}\n"


def test_the_command_draws_a_key() -> None:
    done = keys_command("--generate")
    key = done.stderr.strip().rpartition(" ")[2]
    assert len(key) >= 43
    assert done.stdout == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.mark.parametrize(("arguments", "given"), [(("two words",), "abc"), ((), ""), ((), "a key"), ((), "a,b")])
def test_the_command_refuses_what_cannot_be_used(arguments: tuple[str, ...], given: str) -> None:
    done = keys_command(*arguments, given=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
