"""Takes a trace of a running server: what all its processes did for some seconds, as a file for ui.perfetto.dev."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request

import msgspec

from config.output_files import check_output
from config.sources import ConfigError
from tools.arguments import positive, tool_parser
from tools.url_opening import open_url

_EPILOG = """\
Open the file in https://ui.perfetto.dev (which reads it in the browser and sends it nowhere). Requests are shown once
they have ended; docs/operations.md says what the tracks are.

The key of a server that has API keys is read from the variable TOKENMILL_API_KEY.

  python -m tools.trace --url http://127.0.0.1:8000 --seconds 5 --out trace.json
"""
_ANSWER_SECONDS = 60.0  # beyond the trace's own, for the server to write it down


class _TraceError(Exception):
    """The text is one line for the user."""


class _ErrorBody(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


def _fetch(url: str, seconds: float, key: str) -> bytes:
    """The trace; `_TraceError` when there is none to be had."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url.rstrip('/')}/debug/trace?{urlencode({'seconds': seconds})}", headers=headers)
        if request.type not in ("http", "https"):
            raise ValueError("it must begin with http:// or https://")
        with open_url(request, seconds + _ANSWER_SECONDS) as response:
            body: bytes = response.read()
            return body
    except HTTPError as error:
        raise _TraceError(f"{url} answers {error.code}: {_said(error)}") from None
    except URLError as error:
        raise _TraceError(f"{url} cannot be reached: {error.reason}") from None
    except OSError as error:
        raise _TraceError(f"{url}: the connection broke: {error}") from None
    except (InvalidURL, ValueError) as error:
        raise _TraceError(f"--url {url}: {error}") from None
    except HTTPException as error:  # the server has stopped meanwhile, or what listens there speaks something else
        raise _TraceError(f"{url}: no whole answer over HTTP: {_in_a_line(error)}") from None


def _in_a_line(error: HTTPException) -> str:
    """Of what the other side has sent no more than fits there, and nothing that a terminal would obey."""
    text = f"{type(error).__name__} {error!s:.100}"
    return "".join(letter if letter.isprintable() else " " for letter in text).rstrip()


def _said(error: HTTPError) -> str:
    try:
        return msgspec.json.decode(error.read(), type=_ErrorAnswer).error.message
    except (OSError, HTTPException, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "something that is no error of a tokenmill server"


def main(argv: list[str] | None = None) -> int:
    """Take one; returns the exit status."""
    parser = tool_parser("trace", __doc__, _EPILOG)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=positive, default=5.0, help="how long, 0.1 to 60 (default: %(default)s)", metavar="N"
    )
    parser.add_argument("--out", default="trace.json", help="file to write (default: %(default)s)", metavar="FILE")
    options = parser.parse_args(argv)
    try:
        check_output("--out", options.out)
        with ThreadPoolExecutor(1) as thread:
            fetched = thread.submit(_fetch, options.url, options.seconds, os.environ.get("TOKENMILL_API_KEY", ""))
            start = time.monotonic()
            while not fetched.done():
                if sys.stderr.isatty():
                    print(f"\r{time.monotonic() - start:.0f} of {options.seconds:g} s ", end="", file=sys.stderr)
                time.sleep(0.1)
        data = fetched.result()
        Path(options.out).write_bytes(data)
    except (ConfigError, _TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.out}: {len(data)} bytes; open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
