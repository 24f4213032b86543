"""What holds a running server back, and which setting to turn: GET /diagnose, for people."""

import argparse
import http.client
import os
import sys
import time
import urllib.error
import urllib.request

import msgspec

from frontend.diagnosis import DiagnosisObject
from tools.arguments import positive, tool_parser
from tools.doctor.report import render
from tools.url_opening import open_url

_TIMEOUT = 30.0  # seconds
_PERIOD = 2.0  # between two diagnoses, with --watch
_MOST_BYTES = 1 << 20
_KEY_VARIABLE = "TOKENMILL_API_KEY"

_EPILOG = f"""\
The server looks back 30 seconds at most, so ask it under the load that is of interest; --after waits first.
The key may also be in the variable {_KEY_VARIABLE}.

examples:
  python -m tools.doctor --url http://127.0.0.1:8000
  python -m tools.doctor --url http://127.0.0.1:8000 --watch
  python -m tools.doctor --url http://127.0.0.1:8000 --json | jq .metrics

Exit status: 0 when a diagnosis was printed; 1 when the server could not be asked; 2 when something is wrong with the
options; 130 when interrupted.
"""


class DoctorError(Exception):
    """Why there is no diagnosis; the text is one line for the user."""


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("doctor", __doc__, _EPILOG)
    parser.add_argument("--url", type=_url, required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", default=os.environ.get(_KEY_VARIABLE, ""), metavar="KEY", help="where the server asks for one"
    )
    parser.add_argument("--after", type=positive, metavar="SECONDS", help="wait so long before asking")
    parser.add_argument("--watch", action="store_true", help="ask again and again, every two seconds")
    parser.add_argument("--json", action="store_true", help="print what the server answers, as it is")
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must be such as http://127.0.0.1:8000, not {text!r}")
    return text.rstrip("/")


def fetch(url: str, key: str) -> bytes:
    """The answer to GET /diagnose; DoctorError."""
    try:
        request = urllib.request.Request(f"{url}/diagnose", headers={"Authorization": f"Bearer {key}"} if key else {})
        with open_url(request, _TIMEOUT) as response:
            body: bytes = response.read(_MOST_BYTES)  # more than that is no diagnosis
    except urllib.error.HTTPError as error:
        raise DoctorError(f"{url}/diagnose: {error.code}: {_told(error)}") from None
    except urllib.error.URLError as error:
        raise DoctorError(f"{url}: {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DoctorError(f"{url}: {error}") from None
    return body


def _told(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong."""
    try:
        return msgspec.json.decode(error.read(_MOST_BYTES), type=_ErrorBody).error.message
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return error.reason or "no reason given"


def decode(url: str, body: bytes) -> DiagnosisObject:
    """DoctorError when it is none."""
    try:
        return msgspec.json.decode(body, type=DiagnosisObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DoctorError(f"{url}/diagnose: not a diagnosis of this version of tokenmill: {error}") from None


def _wait(seconds: float) -> None:
    """With a countdown on a terminal."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if sys.stderr.isatty():
            print(f"\rasking in {left:.0f} s ", end="", file=sys.stderr, flush=True)
        time.sleep(min(1.0, left))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(arguments: argparse.Namespace) -> None:
    body = fetch(arguments.url, arguments.api_key)
    diagnosis = decode(arguments.url, body)
    if arguments.json:
        print(body.decode(), flush=True)
        return
    try:
        text = render(diagnosis)
    except KeyError as error:  # a measure or a metric
        raise DoctorError(f"{arguments.url}/diagnose: not a diagnosis of this version: no {error}") from None
    if arguments.watch and sys.stdout.isatty():
        text = f"\033[H\033[2J{text}"
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.after is not None:
            _wait(arguments.after)
        _show(arguments)
        while arguments.watch:
            time.sleep(_PERIOD)
            if not arguments.json:
                print()
            try:
                _show(arguments)
            except DoctorError as error:  # it may be starting anew
                print(f"error: {error}", file=sys.stderr, flush=True)
    except DoctorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
