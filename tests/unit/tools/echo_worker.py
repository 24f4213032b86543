"""A process for tests of `tools.gpu_kernels.workers`: answers units with themselves, unless a unit says otherwise."""

import os
import sys
import time
from collections.abc import Iterator

from tools.gpu_kernels.workers import Answer, Request, serve


def _answers(request: Request) -> Iterator[Answer]:
    for unit in request["units"]:
        print("this is no answer")
        if unit == "die":
            sys.exit("what it said last")
        if unit == "abort":
            os.abort()
        if unit == "hang":
            time.sleep(60)
        if unit == "late":
            time.sleep(max(request["late_at"] - time.monotonic(), 0))
        yield {"unit": unit, "process": os.getpid(), "variable": os.environ.get("ECHOED", "")}


if __name__ == "__main__":
    serve(_answers)
