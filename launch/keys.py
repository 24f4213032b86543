"""`python -m launch.keys [NAME]`: a line for the file of `--api-key-file`, from a key that never is an argument."""

import argparse
import getpass
import re
import secrets
import sys

from config.api_keys import MAX_KEY, NAME_PATTERN, SHORT_KEY, is_api_key, key_line

_DESCRIPTION = """\
Make a line for the file that `python -m launch --api-key-file FILE` reads. The key comes from a prompt, or from
standard input where that is no terminal; it is never an argument, since others can read those. The line goes to
standard output. It holds the key's SHA-256 digest, from which a random key cannot be found.

examples:
  a fresh key for the team "search": the key is shown once, the line is appended
    python -m launch.keys search --generate >> keys.txt

  a key that you already have
    python -m launch.keys search < key.txt >> keys.txt
"""


def main() -> int:
    """Exit status: 0 when a line was written, 2 for a name or key that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.keys", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", default="", help="whose key it is; keys of one name are one tenant")
    parser.add_argument("--generate", action="store_true", help="draw a random key and show it on stderr")
    arguments = parser.parse_args()
    if arguments.name and not re.fullmatch(NAME_PATTERN, arguments.name):
        parser.error("name: at most 64 letters, digits, dots, dashes and underscores")
    if arguments.generate:
        key = secrets.token_urlsafe(32)
        print(f"the key, shown only now: {key}", file=sys.stderr)
    else:
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not is_api_key(key):
        parser.error(f"the key must have 1 to {MAX_KEY} printable ASCII characters, no space and no comma")
    if len(key) < SHORT_KEY:
        print(f"warning: a key of less than {SHORT_KEY} characters can be guessed", file=sys.stderr)
    print(key_line(key, arguments.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
