"""Key files for tests."""

from pathlib import Path

from ipc.curve import new_key_pair
from ipc.key_files import KeyPair, write_key_file


def make_key_file(path: Path) -> KeyPair:
    """A new key pair, in a new file."""
    keys = new_key_pair()
    write_key_file(path, keys)
    return keys
