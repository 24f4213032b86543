"""`python -m tools.batch INPUT OUTPUT --model PATH`: answer a file of requests without HTTP."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.metrics import Metrics
from frontend.protocol import chat_decoder, completion_decoder
from frontend.requests import chat_job, completion_job
from frontend.responses import ChatResponder, CompletionResponder, Responder
from ipc.client import AsyncClient
from ipc.messages import ModelInfo
from tools.batch.answers_file import AnswersFile
from tools.batch.engine import EngineError, engine
from tools.batch.requests_file import BatchError, BatchLine, read_requests

_EPILOG = """\
INPUT has one request a line in OpenAI's batch format:
  {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "...", "messages": [...]}}
OUTPUT gets one line an answer, as they come; custom_id says whose it is. All other flags go to the engine, as for
`python -m launch` (--model is required):
  python -m tools.batch in.jsonl out.jsonl --model models/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smol
"""


class Progress:
    """One line on stderr: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._started = self._shown = time.monotonic()
        self._done = self._failed = self._tokens = 0
        self._live = sys.stderr.isatty()

    def add(self, failed: bool, tokens: int) -> None:
        self._done += 1
        self._failed += failed
        self._tokens += tokens
        if time.monotonic() - self._shown >= (0.2 if self._live else 5.0):
            self.show("\r" if self._live else "\n")

    def show(self, end: str = "\n") -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        rest = seconds / self._done * (self._total - self._done) if self._done else 0.0
        print(
            f"{self._done}/{self._total} answered, {self._failed} with an error, "
            f"{self._tokens / max(seconds, 1e-9):.0f} output tokens/s, {seconds:.0f} s, {rest:.0f} s to go   ",
            end=end,
            file=sys.stderr,
            flush=True,
        )


async def answer(client: AsyncClient, model: ModelInfo, line: BatchLine, metrics: Metrics) -> tuple[int, bytes, int]:
    """Status, body and number of output tokens for one request: what HTTP would have answered."""
    generation: Generation | None = None
    responder: Responder
    try:
        if line.url == "/v1/chat/completions":
            job = chat_job(decode_body(bytes(line.body), chat_decoder)[0], model)
            responder = ChatResponder(job, "")
        else:
            job = completion_job(decode_body(bytes(line.body), completion_decoder)[0], model)
            responder = CompletionResponder(job, "")
        generation = Generation(client, job, line.custom_id[:128], metrics)
        batches = [batch async for batch in generation.batches()]
        usage = generation.usage()
        return 200, responder.whole(batches, usage), usage.completion_tokens
    except ApiError as error:
        return error.status, error.encode(), 0
    finally:
        if generation is not None:
            generation.close()


async def run(lines: Sequence[BatchLine], answers: AnswersFile, concurrency: int, flags: Sequence[str]) -> int:
    """Answer all lines; the number of those that got an error."""
    failures = 0
    async with engine(flags) as endpoints:
        client = AsyncClient(endpoints)
        model = await client.connect(60.0)
        progress = Progress(len(lines))
        metrics = Metrics()
        waiting = iter(lines)

        async def work() -> None:
            nonlocal failures
            for line in waiting:
                status, body, tokens = await answer(client, model, line, metrics)
                answers.write(line.custom_id, status, body)
                failures += status != 200
                progress.add(status != 200, tokens)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(lines))):
                group.create_task(work())
        progress.show()
        await client.close()
    return failures


def main() -> int:
    """Exit status: 0 when every request has an answer, 1 when some are errors, 2 when nothing could be done."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.batch",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="requests, one a line")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="answers, one a line")
    parser.add_argument("--concurrency", type=int, default=64, help="requests under way at once (default: 64)")
    parser.add_argument("--resume", action="store_true", help="go on with an OUTPUT that an earlier run began")
    arguments, flags = parser.parse_known_args()
    if not 1 <= arguments.concurrency <= 4096:
        parser.error(f"--concurrency: must be from 1 to 4096, not {arguments.concurrency}")
    try:
        lines = read_requests(arguments.input)
        with AnswersFile(arguments.output, arguments.resume) as answers:
            lines = [line for line in lines if line.custom_id not in answers.done]
            if answers.done:
                print(f"{len(answers.done)} answered by an earlier run, {len(lines)} to go", file=sys.stderr)
            failures = asyncio.run(run(lines, answers, arguments.concurrency, flags)) if lines else 0
        return 1 if failures else 0
    except FileExistsError:
        print(f"error: {arguments.output} exists: remove it, or go on with it by --resume", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except BatchError as error:
        print(f"error: {arguments.input}: {error}", file=sys.stderr)
    except (EngineError, TimeoutError) as error:
        print(f"error: {error or 'the engine did not answer within 60 seconds'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
