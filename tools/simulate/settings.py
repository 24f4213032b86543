"""Command line of the simulator: its own options, and every scheduler setting under the server's flag."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from config.schema import SchedulerConfig
from config.sources import Option, options, read_settings
from scheduler_proc.batching import Batching
from tools.arguments import count, not_negative, positive, tool_parser, whole
from tools.simulate.costs import DEFAULT_COST
from tools.simulate.page import MAX_RUNS

# As the server chooses on a CPU.
_MAX_SEQS = 64
_STEP_TOKENS = 512

_SCHEDULER_OPTIONS = tuple(option for option in options() if option.section == "scheduler")

_EPILOG = """\
examples:
  what iteration-level scheduling buys on a trace
    python -m tools.simulate --trace azure2023_conv.jsonl --batching static,dynamic,continuous --html page.html

  KV pools of different sizes side by side
    python -m tools.simulate --trace mooncake.jsonl --sweep kv-tokens=16384,65536,262144

  how far each eviction policy is from the optimum
    python -m tools.simulate --trace mooncake.jsonl --cache-study

  whether this version still plans what a recorded server planned, and how that server did
    python -m tools.simulate --replay events.log

Exit status: 0; 1 when a replay differs from its log; 2 when something is wrong with the options or files.
"""


class UsageError(Exception):
    """Options that cannot be used; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of the comparison."""

    label: str
    batching: Batching
    config: SchedulerConfig
    kv_tokens: int | None  # None: as many as the trace has
    host_blocks: int


_REPLAY_OPTIONS = ("trace", "replay", "json", "slo_ttft_ms", "slo_tpot_ms")

# Settings that can be swept beside the scheduler's.
_SIZES = ("kv-blocks", "kv-tokens", "host-blocks")


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "simulate",
        "The real scheduler core driven by a trace and a cost model, on a virtual clock, without a device.",
        _EPILOG,
        usage="python -m tools.simulate (--trace FILE | --replay LOG) [options]",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Mooncake's JSON lines, Azure's CSV, or a recorded event log",
    )
    source.add_argument(
        "--replay", type=Path, metavar="LOG", help="check that a recorded event log gives its plans again"
    )
    parser.add_argument("--cache-study", action="store_true", help="compare eviction policies with Belady's optimum")
    trace = parser.add_argument_group("the trace")
    trace.add_argument("--limit", type=count, metavar="N", help="only the first N requests")
    trace.add_argument(
        "--rate-scale", type=positive, default=1.0, metavar="X", help="requests arrive X times as fast (default: 1)"
    )
    trace.add_argument(
        "--length-scale", type=positive, default=1.0, metavar="X", help="prompts and outputs are X times as long"
    )
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--kv-blocks", type=count, metavar="N", help="KV pool in blocks (default: no shortage)")
    engine.add_argument("--kv-tokens", type=count, metavar="N", help="the same in tokens")
    engine.add_argument("--host-blocks", type=whole, default=0, metavar="N", help="host tier in blocks (default: 0)")
    engine.add_argument(
        "--max-model-len", type=count, metavar="N", help="longer requests are refused (default: the longest fits)"
    )
    engine.add_argument(
        "--cost",
        default=str(DEFAULT_COST),
        metavar="A,B,C,D,E|fit:LOG",
        help="microseconds of a step: fixed, per prefill token, per decoding request, per token of context that is "
        "read, per pair of a prefill token and one before it; or fitted to an event log "
        f"(default: {DEFAULT_COST})",
    )
    engine.add_argument(
        "--copy-us",
        type=not_negative,
        default=40.0,
        metavar="US",
        help="microseconds to copy a block between KV pool and host, beside the forward (default: 40)",
    )
    compare = parser.add_argument_group("comparing")
    compare.add_argument(
        "--batching",
        default="continuous",
        metavar="{" + ",".join(get_args(Batching)) + "},...",
        help="who may join a batch; several, comma-separated, are compared (default: continuous)",
    )
    compare.add_argument(
        "--sweep", metavar="SETTING=V1,V2,...", help=f"compare values of a setting below, or of {', '.join(_SIZES)}"
    )
    out = parser.add_argument_group("results")
    out.add_argument("--slo-ttft-ms", type=positive, default=1000.0, metavar="MS", help="for goodput (default: 1000)")
    out.add_argument("--slo-tpot-ms", type=positive, default=60.0, metavar="MS", help="for goodput (default: 60)")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    group = parser.add_argument_group("scheduler settings", "as for `python -m launch`")
    for option in _SCHEDULER_OPTIONS:
        text = (option.meta.description or "").replace("%", "%%")
        if option.kind is bool:
            group.add_argument(option.flag, dest=option.key, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.name.upper()
            group.add_argument(option.flag, dest=option.key, metavar=metavar, help=text)
    return parser


def check_replay_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """UsageError that names the options which a replay cannot heed."""
    flags = {option.key: option.flag for option in _SCHEDULER_OPTIONS}
    useless = [
        flags.get(name, "--" + name.replace("_", "-"))
        for name, value in vars(arguments).items()
        if name not in _REPLAY_OPTIONS and value != parser.get_default(name)
    ]
    if useless:
        raise UsageError(f"{', '.join(useless)}: not with --replay, which runs what was recorded as it was recorded")


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """The runs that were asked for; UsageError, or ConfigError for a scheduler setting."""
    batchings: list[Batching] = []
    for name in arguments.batching.split(","):
        for batching in get_args(Batching):
            if name == batching:
                batchings.append(batching)
                break
        else:
            raise UsageError(f"--batching: must be of {', '.join(get_args(Batching))}, not {name!r}")
    flags = _scheduler_flags(arguments)
    setting, values = _sweep(arguments.sweep)
    found = [
        _variant(arguments, flags, batching, setting, value) for batching, value in itertools.product(batchings, values)
    ]
    if len(found) > MAX_RUNS:
        raise UsageError(f"{len(found)} runs were asked for; at most {MAX_RUNS} can be compared")
    return found


def _variant(
    arguments: argparse.Namespace, flags: Sequence[str], batching: Batching, setting: str, value: str
) -> Variant:
    sizes: dict[str, int | None] = {
        "kv-blocks": arguments.kv_blocks,
        "kv-tokens": arguments.kv_tokens,
        "host-blocks": arguments.host_blocks,
    }
    extra: list[str] = []
    if setting in sizes:
        try:
            sizes[setting] = (whole if setting == "host-blocks" else count)(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--sweep {setting}: {error}") from None
        if setting == "kv-tokens":
            sizes["kv-blocks"] = None
    elif setting:
        extra = _flag(next(option for option in _SCHEDULER_OPTIONS if option.flag == f"--{setting}"), value)
    config = resolved(read_settings([*flags, *extra, "--model", "none"], {}, "").config.scheduler)
    if sizes["kv-blocks"] is not None:
        sizes["kv-tokens"] = sizes["kv-blocks"] * config.block_size
    _check_host_tier(config, sizes["host-blocks"] or 0)
    label = f"{setting} {value}" if setting else batching
    if setting and "," in arguments.batching:
        label = f"{batching}, {label}"
    return Variant(label, batching, config, sizes["kv-tokens"], sizes["host-blocks"] or 0)


def _check_host_tier(config: SchedulerConfig, host_blocks: int) -> None:
    """What the server refuses as well: blocks on the host are kept in the radix tree."""
    if host_blocks and not config.prefix_cache:
        raise UsageError("--host-blocks: not with --no-prefix-cache, since the radix tree is what holds them")
    if config.kv_shortage == "swap" and not host_blocks:
        raise UsageError("--kv-shortage swap: needs --host-blocks, as many as are to be swapped out at once")


def resolved(config: SchedulerConfig) -> SchedulerConfig:
    """What the server would fill in (`config.resolve`); UsageError for settings that contradict each other."""
    max_seqs = config.max_seqs or min(_MAX_SEQS, config.max_step_tokens or _MAX_SEQS)
    step_tokens = config.max_step_tokens or max(_STEP_TOKENS, max_seqs)
    chunk = config.prefill_chunk or step_tokens
    if max_seqs > step_tokens:
        raise UsageError(f"--max-seqs {max_seqs}: must not be more than --max-step-tokens, {step_tokens}")
    if chunk > step_tokens:
        raise UsageError(f"--prefill-chunk {chunk}: must not be more than --max-step-tokens, {step_tokens}")
    return msgspec.structs.replace(config, max_seqs=max_seqs, max_step_tokens=step_tokens, prefill_chunk=chunk)


def _scheduler_flags(arguments: argparse.Namespace) -> list[str]:
    """What was given of the scheduler's settings, as flags of the server, whose reader then checks them."""
    given = vars(arguments)
    flags: list[str] = []
    for option in _SCHEDULER_OPTIONS:
        if given[option.key] is not None:
            flags += _flag(option, str(given[option.key]))
    return flags


def _flag(option: Option, value: str) -> list[str]:
    if option.kind is not bool:
        return [f"{option.flag}={value}"]
    if value.lower() not in ("true", "false"):
        raise UsageError(f"{option.flag}: must be true or false, not {value!r}")
    return [option.flag if value.lower() == "true" else f"--no-{option.flag[2:]}"]


def _sweep(text: str | None) -> tuple[str, list[str]]:
    """Setting (its flag without dashes) and values; ("", [""]) for none."""
    if text is None:
        return "", [""]
    setting, separator, values = text.partition("=")
    setting = setting.removeprefix("--").replace("_", "-")
    known = [option.flag[2:] for option in _SCHEDULER_OPTIONS] + list(_SIZES)
    if setting not in known:
        raise UsageError(f"--sweep: {setting!r} is none of {', '.join(known)}")
    if not separator or not all(values.split(",")):
        raise UsageError(f"--sweep: must be SETTING=V1,V2,..., not {text!r}")
    return setting, values.split(",")
