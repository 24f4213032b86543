"""The command line of the tuner."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.arguments import count, positive, tool_parser, whole
from tools.loadgen.slo import SLO_HELP, Slo, parse_slo
from tools.tune.grid import parse_grid
from tools.tune.space import SEARCHED, Value

_EPILOG = f"""\
What it does:
  1. calibrates: starts the server with your flags, loads it with prompts and batches of many sizes, and fits how long
     steps take (--calibration FILE keeps that for the next time)
  2. searches: simulates the trace with the real scheduler and these costs, for some hundred combinations of settings
  3. confirms: measures the defaults and the best three on the real server, interleaved, under the same trace; with
     --grid also combinations that you name, which tell how far the choice is from the best of them
Then it prints the flags that were best when measured, what was predicted and what was measured of each, and what each
flag that differs from the defaults contributes.

What counts is the goodput at the trace's own rate: requests a second that meet the SLO. With --find-rate it is the
highest rate at which 90% of them meet it; the confirmation then runs at the rate that was predicted for the best.

Settings that are searched, unless the server's flags say them: {", ".join(SEARCHED[:6])},
{", ".join(SEARCHED[6:])} (only with --may-refuse).

examples:
  python -m tools.tune --trace trace.jsonl --limit 200 --slo ttft=1s,tpot=60ms -- --model models/model.gguf

  a recorded trace twice as fast, without measuring the result
    python -m tools.tune --trace trace.jsonl --rate-scale 2 --slo ttft=500ms,itl=100ms --no-confirm \\
        --calibration machine.json -- --model MODEL --kv-memory 4GiB

  how good is the choice? measured beside a grid of six combinations
    python -m tools.tune --trace trace.jsonl --limit 80 --slo ttft=2s,tpot=60ms \\
        --grid 'max-seqs=8,32,128 max-step-tokens=128,512' -- --model models/model.gguf

Nothing else should run on the machine meanwhile. The server answers on a free port of 127.0.0.1. See docs/tune.md.

Exit status: 0; 1 when a server or a process failed; 2 when something is wrong with the options or files; 3 when the
load generator was the bottleneck of a measurement, which then says nothing; 130 when it was interrupted. What was
measured before a failure or an interrupt is reported all the same.
"""


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _grid(text: str) -> list[dict[str, Value]]:
    try:
        return parse_grid(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _settings(text: str) -> list[str]:
    names = [name.removeprefix("--").replace("-", "_") for name in text.split(",")]
    for name in names:
        if name not in SEARCHED:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SEARCHED)}")
    return names


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "tune",
        "Find the scheduler settings with which this server serves a trace best under an SLO.",
        _EPILOG,
        usage="python -m tools.tune --trace FILE --slo LIMITS [options] -- --model MODEL [flags of the server]",
    )
    add: Callable[..., Any]
    parser.add_argument("server", nargs="*", metavar="FLAG", help="after --: flags of python -m launch")

    add = parser.add_argument_group("the load").add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's lines, Azure's CSV, or our recording")
    add("--slo", type=_slo, required=True, metavar="LIMITS", help=f"what a request must meet: {SLO_HELP}")
    add("--limit", type=count, metavar="N", help="only the first N requests of the trace")
    add("--rate-scale", type=positive, default=1.0, metavar="X", help="requests arrive X times as fast (default: 1)")
    add("--length-scale", type=positive, default=1.0, metavar="X", help="prompts and outputs are X times as long")

    add = parser.add_argument_group("calibration").add_argument
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="use what is in FILE; where there is none, measure and write it",
    )
    add("--calibration-seconds", type=positive, default=60.0, metavar="S", help="about how long it takes (default: 60)")

    add = parser.add_argument_group("search").add_argument
    add("--find-rate", action="store_true", help="look for the highest rate at which 90%% meet the SLO")
    add("--settings", type=_settings, metavar="NAME,...", help="search only these")
    add("--may-refuse", action="store_true", help="also try --ttft-target-ms, which refuses what would be late")
    add("--budget", type=count, default=200, metavar="N", help="most combinations that are simulated (default: 200)")
    add("--seed", type=whole, default=0, metavar="N", help="of the search and of all orders (default: 0)")
    add(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="that simulate at once (default: one for each core, here %(default)s)",
    )

    add = parser.add_argument_group("confirmation").add_argument
    add("--confirm", action=argparse.BooleanOptionalAction, default=True, help="measure on the real server (default)")
    add("--best", type=count, default=3, metavar="N", help="how many of those found best are measured (default: 3)")
    add(
        "--grid",
        type=_grid,
        action="append",
        default=[],
        metavar="SETTINGS",
        help="also measure all combinations of these, such as 'max-seqs=8,32 max-step-tokens=128,512'; may be repeated",
    )
    add("--rounds", type=count, default=1, metavar="N", help="how often each is measured (default: 1)")

    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    return parser
