"""The command line of the load generator."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from tools.arguments import count, not_negative, positive, tool_parser, whole
from tools.loadgen.messages import API_KEY_VARIABLE, Api
from tools.loadgen.servers import SERVERS
from tools.loadgen.slo import SLO_HELP, parse_slo
from tools.loadgen.synthetic import ARRIVALS_HELP, LENGTHS_HELP, SpecError, parse_arrivals, parse_lengths

T = TypeVar("T")

DEFAULT_REQUESTS = 200
DEFAULT_INPUT, DEFAULT_OUTPUT = "256", "64"  # tokens

_EPILOG = f"""\
Times are measured from when a request was due, not from when the client got round to sending it, so that a server that
stalls is seen by every request due meanwhile. The client measures itself; when it was the bottleneck the run is void.
Definitions, limits and formats: docs/loadgen.md. The key for the server comes from {API_KEY_VARIABLE}.

examples:
  a trace with shared prefixes, four times as fast, and what of it is in time
    python -m tools.loadgen --trace mooncake_conversation_div16.jsonl --limit 500 --rate-scale 4 \\
        --slo ttft=1s,tpot=60ms --html page.html

  the highest rate at which 90% and 99% of a trace's requests are in time
    python -m tools.loadgen --trace azure2023_conv.jsonl --length-scale 0.1 --slo ttft=1s,tpot=60ms --find-rate

  bursts of chats, and 16 users that think for two seconds
    python -m tools.loadgen --arrivals gamma:5,3 --input-tokens lognormal:300,0.8 --output-tokens 64 --api chat
    python -m tools.loadgen --arrivals closed:16,2 --requests 320

Exit status: 0; 1 when no request was answered, or a search ended early since the server was gone; 2 when something is
wrong with the options, the files or the server; 3 when the run is void; 130 when it was interrupted. What was done is
reported.
"""


def _spec(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser's errors as argparse wants them."""

    def typed(text: str) -> T:
        try:
            return parse(text)
        except (SpecError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _token_range(text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    if not separator or not low.isdecimal() or not high.isdecimal() or not int(low) < int(high) < 1 << 31:
        raise ValueError(f"must be LOW:HIGH, token ids below 2^31, not {text!r}")
    return int(low), int(high)


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "loadgen",
        "Replay a trace against a server, and read latencies and goodput under an SLO.",
        _EPILOG,
        usage="python -m tools.loadgen [--url URL | --sdk ADDRESS] [--trace FILE] [options]",
    )
    add: Callable[..., Any]

    add = parser.add_argument_group("where").add_argument
    add("--url", default="http://127.0.0.1:8000", help="of a server with OpenAI's protocol (default: %(default)s)")
    add("--sdk", metavar="ADDRESS,...", help="use the client SDK: the ZeroMQ addresses that the server's log names")
    add("--sdk-key", metavar="FILE", help="this client's key pair, for a server with --sdk-keys (docs/sdk.md)")
    add("--sdk-server-key", metavar="KEY", help="the server's public key, 40 characters; goes with --sdk-key")
    add("--model", default="", help="name of the served model (default: the server's first)")
    add(
        "--server",
        choices=("auto", *SERVERS),
        default="auto",
        help="what may be said beyond OpenAI's protocol (default: by what /v1/models says)",
    )
    add("--timings", action=argparse.BooleanOptionalAction, default=True, help="ask for the server's own timelines")
    add("--timeout", type=positive, default=600.0, metavar="S", help="of one request (default: 600)")

    add = parser.add_argument_group("what").add_argument
    add("--trace", type=Path, metavar="FILE", help="Mooncake, Azure, our recording, OpenAI bodies, or texts")
    add("--limit", type=count, metavar="N", help="only the first N requests of the trace")
    add("--length-scale", type=positive, default=1.0, metavar="X", help="prompts and outputs are X times as long")
    add(
        "--requests",
        type=count,
        metavar="N",
        help=f"without a trace: how many (default: {DEFAULT_REQUESTS}, or as many as come in --duration)",
    )
    add("--input-tokens", type=_spec(parse_lengths), metavar="LENGTHS", help="without a trace, see below")
    add(
        "--output-tokens",
        type=_spec(parse_lengths),
        metavar="LENGTHS",
        help=f"likewise: {LENGTHS_HELP} (defaults: {DEFAULT_INPUT} and {DEFAULT_OUTPUT})",
    )
    add(
        "--api",
        choices=get_args(Api),
        default="tokens",
        help="prompts are token ids, text, or chats; all of exact length (default: tokens)",
    )
    add("--text-output", type=count, default=128, metavar="N", help="max_tokens where a trace of texts says none")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="default: 0")
    add(
        "--token-range",
        type=_spec(_token_range),
        default=(1000, 30000),
        metavar="LOW:HIGH",
        help="ids that prompts are made of, HIGH left out (default: 1000:30000)",
    )
    add("--seed", type=whole, default=0, metavar="N", help="of arrivals and lengths (default: 0)")
    add(
        "--content-seed",
        type=whole,
        metavar="N",
        help="of the prompts' tokens (default: another each time, so that no cache has them)",
    )

    add = parser.add_argument_group("when").add_argument
    add(
        "--arrivals",
        type=_spec(parse_arrivals),
        metavar="PROCESS",
        help=f"{ARRIVALS_HELP}; rates in requests a second (default: the trace's own times, else poisson:2)",
    )
    add("--rate-scale", type=positive, default=1.0, metavar="X", help="X times as fast (default: 1)")
    add("--duration", type=positive, metavar="S", help="send nothing after S seconds")
    add("--ramp", type=not_negative, default=0.0, metavar="S", help="the rate rises from 0 in S seconds; not measured")
    add("--warmup", type=not_negative, default=0.0, metavar="S", help="not measured, after the ramp")
    add("--cooldown", type=not_negative, default=0.0, metavar="S", help="not measured, before the end")

    add = parser.add_argument_group("how good").add_argument
    add("--slo", type=_spec(parse_slo), metavar="LIMITS", help=f"for goodput: {SLO_HELP}")
    add("--find-rate", action="store_true", help="find the highest rates at which 90%% and 99%% meet the SLO")
    add("--probe-seconds", type=positive, default=30.0, metavar="S", help="of each rate that is tried (default: 30)")
    add("--probes", type=count, default=12, metavar="N", help="most rates that are tried (default: 12)")
    add("--precision", type=positive, default=0.1, metavar="X", help="of the rate, relative (default: 0.1)")

    add = parser.add_argument_group("the client itself").add_argument
    add(
        "--processes",
        type=count,
        default=max(1, min(4, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help="that send (default: half of the cores, at most 4; here %(default)s)",
    )
    add(
        "--max-send-lag-ms",
        type=positive,
        default=20.0,
        metavar="MS",
        help="the run is void when more than 1%% of the requests were sent later than this (default: 20)",
    )
    add(
        "--max-loop-lag-ms",
        type=positive,
        default=20.0,
        metavar="MS",
        help="likewise when for more than 1%% of the time what came had to wait longer (default: 20)",
    )
    add(
        "--max-cpu",
        type=positive,
        default=0.8,
        metavar="X",
        help="likewise when a process took more of a core than this (default: 0.8)",
    )

    add = parser.add_argument_group("results").add_argument
    add("--records", type=Path, metavar="FILE", help="write one JSON line for each request, as it ends")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--html", type=Path, metavar="FILE", help="write a page with charts")
    return parser
