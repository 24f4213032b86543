"""`python -m tools.batch INPUT OUTPUT --model PATH`: answer a file of requests without HTTP."""

import asyncio
import sys
from pathlib import Path

from tools.arguments import tool_parser
from tools.batch.answers_file import AnswersFile
from tools.batch.errors import BatchError, StoppedBySignal
from tools.batch.requests_file import read_requests
from tools.batch.run import run

_EPILOG = """\
INPUT has one request a line in OpenAI's batch format:
  {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "...", "messages": [...]}}
OUTPUT gets one line an answer, as they come; custom_id says whose it is. All other flags go to the engine, as for
`python -m launch` (--model is required):
  python -m tools.batch in.jsonl out.jsonl --model models/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smol

Requests that find the queue full (429) or whose engine died (503) are sent again a few times. --resume answers what
has no answer yet, and again what has 429 or a status from 500 on.

Exit status: 0 when every request has an answer, 1 when OUTPUT has errors among them, 2 when the batch could not start
or go on, 130 or 143 when a signal stopped it (SIGINT, SIGTERM).
"""
_GO_ON = "what has no answer yet is answered by the same command with --resume"


def main() -> int:
    """The exit status."""
    parser = tool_parser("batch", __doc__, _EPILOG)
    parser.add_argument("input", type=Path, metavar="INPUT", help="requests, one a line")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="answers, one a line")
    parser.add_argument("--concurrency", type=int, default=64, help="requests under way at once (default: 64)")
    parser.add_argument("--resume", action="store_true", help="go on with an OUTPUT that an earlier run began")
    arguments, flags = parser.parse_known_args()
    if not 1 <= arguments.concurrency <= 4096:
        parser.error(f"--concurrency: must be from 1 to 4096, not {arguments.concurrency}")
    begun = False
    try:
        lines = read_requests(arguments.input)
        with AnswersFile(arguments.output, arguments.resume) as answers:
            lines = [line for line in lines if line.custom_id not in answers.done]
            if answers.done:
                print(f"{len(answers.done)} answered by an earlier run, {len(lines)} to go", file=sys.stderr)
            if lines:
                try:
                    asyncio.run(run(lines, answers, arguments.concurrency, flags))
                finally:
                    begun = answers.opened
        return 1 if answers.errors else 0
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except BatchError as error:
        print(f"error: {error}" + (f"; {_GO_ON}" if begun else ""), file=sys.stderr)
    except StoppedBySignal as stopped:
        print(f"{stopped}; {_GO_ON}", file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt:  # before anything was started
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
