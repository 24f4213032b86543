"""Experiments on a real server: `python -m tools.drills --help`."""

import argparse
import asyncio
import signal
import sys
from typing import Any

from tools.arguments import count, positive, share, whole
from tools.drills import diagnosis, grammars, itl, measuring, overhead, sdk, shortage, slo, soak, start
from tools.drills.scenarios import NAMES

_DEFAULT_MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.drills",
        description="Start a real server, put it under a load that hurts, and print what came of it. Nothing else "
        "should run on the machine meanwhile.",
    )
    drills = parser.add_subparsers(dest="drill", required=True, metavar="DRILL")

    part = drills.add_parser("itl", help="streams that decode while a long prompt arrives")
    part.add_argument("--prompt-tokens", type=count, default=4000, help="length of the long prompt (default 4000)")
    part.add_argument("--streams", type=count, default=8, help="default 8")
    part.add_argument("--repeats", type=count, default=20, help="default 20")
    part.add_argument("--max-itl-ms", type=positive, nargs="*", default=[60.0], help="limits to try (default 60)")
    part.set_defaults(run=itl.run)

    part = drills.add_parser("slo", help="three times the load that can be served in time")
    part.add_argument("--trace", required=True, help="an Azure trace: timestamp, input_length, output_length")
    part.add_argument("--length-scale", type=positive, default=1 / 32, help="factor on all lengths (default 1/32)")
    part.add_argument("--requests", type=count, default=1000, help="of the trace (default 1000)")
    part.add_argument("--slo-ttft-ms", type=positive, default=1000.0, help="default 1000")
    part.add_argument("--slo-tpot-ms", type=positive, default=60.0, help="default 60")
    part.add_argument("--margin", type=positive, default=0.8, help="admission's target as a part of the TTFT SLO")
    part.add_argument("--first-rate", type=positive, default=2.0, help="first requests/s of the bisection (default 2)")
    part.add_argument("--probes", type=count, default=7, help="steps of the bisection (default 7)")
    part.set_defaults(run=slo.run)

    part = drills.add_parser("shortage", help="more long requests than the KV pool holds")
    part.add_argument("--requests", type=count, default=64, help="default 64")
    part.add_argument("--fitting", type=count, default=10, help="how many of them the pool holds (default 10)")
    part.add_argument("--prompt-tokens", type=count, default=200, help="default 200")
    part.add_argument("--output-tokens", type=count, default=100, help="default 100")
    part.set_defaults(run=shortage.run)

    part = drills.add_parser("soak", help="rows x context for a long time, in a pool that holds a few contexts")
    part.add_argument("--seconds", type=positive, default=600.0, help="default 600")
    part.add_argument("--rows", type=count, default=16, help="requests at once (default 16)")
    part.add_argument("--context", type=count, default=1024, help="tokens of each request (default 1024)")
    part.add_argument("--pool-contexts", type=count, default=4, help="contexts that the KV pool holds (default 4)")
    part.add_argument("--kv-shortage", default="recompute", choices=("wait", "recompute", "swap"))
    part.set_defaults(run=soak.run)

    part = _explained(
        drills, "overhead", "what scheduler, tokenizer, HTTP and Python add to the kernels", overhead.HELP
    )
    part.add_argument("--streams", type=count, nargs="+", default=[1, 8, 32], help="default 1 8 32")
    part.add_argument("--requests", type=count, default=4, help="of each stream (default 4)")
    part.add_argument("--prompt-words", type=count, default=128, help="default 128")
    part.add_argument("--output-tokens", type=count, default=128, help="default 128")
    part.set_defaults(run=overhead.run)

    part = _explained(
        drills, "start", "time from start to the first answer, and the memory of each process", start.HELP
    )
    part.add_argument("--repeats", type=count, default=3, help="warm starts (default 3)")
    part.add_argument("--kv-memory", default="256MiB", help="size of the KV pool (default 256MiB)")
    part.set_defaults(run=start.run)

    part = _explained(
        drills, "grammars", "time per token and throughput with and without structured output", grammars.HELP
    )
    part.add_argument("--streams", type=count, nargs="+", default=[1, 16], help="default 1 16")
    part.add_argument("--output-tokens", type=count, default=128, help="default 128")
    part.add_argument("--rounds", type=count, default=5, help="default 5")
    part.set_defaults(run=grammars.run)

    part = _explained(
        drills, "diagnosis", "whether the change that is advised first is the one that helps most", diagnosis.HELP
    )
    part.add_argument("--seconds", type=positive, default=15.0, help="of load on each server (default 15)")
    part.add_argument("--seed", type=whole, default=0, help="of the scenarios' parameters (default 0)")
    part.add_argument("--json", metavar="FILE", help="add a line with all that was measured for each scenario")
    part.add_argument(
        "--scenarios",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help="default: all, which are " + ", ".join(map(repr, NAMES)),
    )
    part.set_defaults(run=diagnosis.run)

    part = _explained(
        drills, "measuring", "throughput with all measuring and without any, in interleaved pairs", measuring.HELP
    )
    part.add_argument("--pairs", type=count, default=10, help="default 10")
    part.add_argument("--streams", type=count, default=16, help="default 16")
    part.add_argument("--turns", type=count, default=8, help="of each of the two servers of a pair (default 8)")
    part.add_argument(
        "--requests", type=count, default=2, help="of each stream in a turn, after a shorter one (default 2)"
    )
    part.set_defaults(run=measuring.run)

    part = _explained(
        drills, "sdk", "the client SDK: its package, its latency, and many requests over a restart", sdk.HELP
    )
    part.add_argument("--requests", type=count, default=1000, help="at once (default 1000)")
    part.add_argument("--cancel-share", type=share, default=0.1, help="of them, cancelled (default 0.1)")
    part.add_argument("--output-tokens", type=count, default=8, help="of each (default 8)")
    part.add_argument("--retries", type=whole, default=2, help="of each (default 2)")
    part.add_argument("--deadline", type=positive, default=300.0, help="of each, in seconds (default 300)")
    part.add_argument("--latency-requests", type=count, default=200, help="short ones, of each way (default 200)")
    part.set_defaults(run=sdk.run)

    for part in drills.choices.values():
        part.add_argument("--model", default=_DEFAULT_MODEL, help=f"default {_DEFAULT_MODEL}")
    return parser


def _explained(drills: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """A drill with a longer text in its own help."""
    parser: argparse.ArgumentParser = drills.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser


async def _run(options: argparse.Namespace) -> None:
    """The drill; ended by SIGTERM as by Ctrl-C, since its server must end with it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await options.run(options)


def main() -> None:
    options = _parser().parse_args()
    try:
        asyncio.run(_run(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped")


if __name__ == "__main__":
    main()
