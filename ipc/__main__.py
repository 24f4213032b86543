"""`python -m tokenmill_client keygen FILE [NAME]` (in a checkout: `python -m ipc`): a key pair for CURVE."""

import argparse
import re
import sys
from pathlib import Path

from .curve import new_key_pair
from .key_files import NAME_PATTERN, key_line, write_key_file

_DESCRIPTION = """\
Make a key pair for connections over TCP. It goes into a new file that only you can read; what others may know goes to
standard output.

examples:
  on the server, once: its key pair; clients need the public key that is shown
    python -m ipc keygen server.key

  on a client, with the name of its tenant: the line that is shown belongs into the server's list
    python -m tokenmill_client keygen client.key search

  then
    python -m launch --model ... --sdk-listen tcp://0.0.0.0:7000 --sdk-server-key server.key --sdk-keys clients.txt
    AsyncClient("tcp://HOST:7000", key="client.key", server_key="...")
"""


def main() -> int:
    """Exit status: 0 when the file was written, 1 when it could not be, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tokenmill_client")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    keygen = commands.add_parser(
        "keygen",
        help="make a key pair",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    keygen.add_argument("file", type=Path, help="new file for the key pair; one that exists is never overwritten")
    keygen.add_argument(
        "name", nargs="?", default="", help="of a client: whose key it is; keys of a name are one tenant"
    )
    arguments = parser.parse_args()
    if arguments.name and not re.fullmatch(NAME_PATTERN, arguments.name):
        parser.error("name: at most 64 letters, digits, dots, dashes and underscores")
    made = new_key_pair()
    try:
        write_key_file(arguments.file, made)
    except OSError as error:
        print(f"error: {arguments.file}: {error.strerror}", file=sys.stderr)
        return 1
    print(key_line(made.public, arguments.name) if arguments.name else made.public.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
