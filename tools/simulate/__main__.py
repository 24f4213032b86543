"""`python -m tools.simulate`: the scheduler without a device. See docs/simulate.md."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from config.output_files import check_apart, check_output
from config.recordings import EVENT_LOG, check_recording, is_of_kind
from config.sources import ConfigError
from scheduler_proc.event_log import EventLogError, create
from tools.reports.table import render
from tools.simulate.cache_study import STUDY_LABELS, study, study_rows
from tools.simulate.costs import DEFAULT_COST, CostError, StepCost, parse_cost
from tools.simulate.page import page
from tools.simulate.replay import cost_from_log, replay, trace_from_log
from tools.simulate.report import latency_rows, summary_rows
from tools.simulate.settings import UsageError, Variant, build_parser, check_replay_options, variants
from tools.simulate.simulator import Run, Setup, Simulation, SimulationError
from tools.simulate.summary import Slo, Summary, latencies_of, summarize
from tools.simulate.traces import TraceRequest, infinite_cache_hits, read_trace
from tools.traces import TraceError, scaled_rate

_SIGPIPE_STATUS = 141  # what a shell shows for a program that SIGPIPE has ended
_QUIET_SECONDS = 2.0  # what takes longer says how far it is


class Progress:
    """Lines on stderr about what takes long."""

    def __init__(self) -> None:
        self._begun = self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print unless the last line is too fresh."""
        now = time.monotonic()
        if now - self._said >= _QUIET_SECONDS:
            self._said = now
            print(f"[{now - self._begun:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        status = _run(parser, arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read (`| head`) has seen enough; what is still buffered goes nowhere, or the exit would complain too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_STATUS
    except (TraceError, EventLogError, CostError, ConfigError, UsageError, SimulationError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    inputs = {"--trace": arguments.trace, "--replay": arguments.replay}
    check_apart({**inputs, "--json": arguments.json, "--html": arguments.html})
    for flag, output in (("--json", arguments.json), ("--html", arguments.html)):
        if output is not None:
            check_output(flag, output)
    if arguments.replay is not None:
        check_replay_options(parser, arguments)
        return _replay(arguments)
    if arguments.cache_study and arguments.html is not None:
        raise UsageError("--html: not with --cache-study, which has no page; it has --json")
    trace = _read(arguments)
    if arguments.cache_study:
        return _study(arguments, trace)
    return _simulate(arguments, trace)


def _slo(arguments: argparse.Namespace) -> Slo:
    return Slo(arguments.slo_ttft_ms / 1e3, arguments.slo_tpot_ms / 1e3)


def _replay(arguments: argparse.Namespace) -> int:
    progress = Progress()
    result = replay(arguments.replay, lambda events: progress.say(f"{events:,} events"))
    note = "; the log's last record is cut off" if result.log.cut else ""
    print(f"{result.events:,} events, {result.equal:,} of {result.plans:,} plans are the same{note}")
    if result.difference:
        print(f"first difference: {result.difference}; what follows was not replayed")
    latencies = latencies_of(result.observer, _slo(arguments))
    print(render(["recorded"], latency_rows([latencies])))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(latencies)))
    return 1 if result.difference else 0


def _read(arguments: argparse.Namespace) -> list[TraceRequest]:
    progress = Progress()
    if is_of_kind(EVENT_LOG, arguments.trace):
        if arguments.length_scale != 1:
            raise UsageError("--length-scale: a recorded log's tokens cannot be made more or fewer")
        trace = trace_from_log(
            arguments.trace, limit=arguments.limit, progress=lambda events: progress.say(f"reading, {events:,} events")
        )
    else:
        trace = read_trace(arguments.trace, limit=arguments.limit, length_scale=arguments.length_scale)
    return scaled_rate(trace, arguments.rate_scale)


def _study(arguments: argparse.Namespace, trace: list[TraceRequest]) -> int:
    progress = Progress()
    results = []
    for variant in variants(arguments):
        block_size = variant.config.block_size
        result = study(
            trace,
            block_size,
            None if variant.kv_tokens is None else max(1, variant.kv_tokens // block_size),
            lambda policy, done, of: progress.say(f"{policy}: {done:,} of {of:,} prompts"),
        )
        print(
            f"{len(trace):,} prompts of {result.prompt_tokens:,} tokens, {result.unique_blocks:,} different blocks of "
            f"{block_size} tokens; the cache holds {result.capacity:,}"
        )
        print(render(STUDY_LABELS, study_rows(result)))
        results.append(result)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0


def _simulate(arguments: argparse.Namespace, trace: list[TraceRequest]) -> int:
    cost, origin = _cost(arguments.cost)
    setups = [_setup(arguments, trace, variant, cost) for variant in variants(arguments)]
    log_path = setups[0].config.event_log
    if log_path and (len(setups) > 1 or setups[0].batching != "continuous"):
        raise UsageError("--event-log: records one run, with --batching continuous")
    if log_path:
        check_recording(EVENT_LOG, log_path)
    slo = _slo(arguments)
    notes = [
        f"{arguments.trace.name}: {len(trace):,} requests, {sum(request.input_length for request in trace):,} prompt "
        f"tokens, {sum(request.output_length for request in trace):,} output tokens, "
        f"{trace[-1].time:,.1f} s from the first arrival to the last",
        f"step cost in microseconds: {cost} ({origin})",
    ]
    longer = sum(request.input_length + request.output_length > setups[0].max_model_len for request in trace)
    if longer:
        notes.append(f"{longer:,} requests are longer than --max-model-len {setups[0].max_model_len} and are refused")
    print("\n".join(notes))
    progress = Progress()
    runs: list[Run] = []
    summaries: list[Summary] = []
    for setup in setups:
        prefix = f"{setup.label}: " if len(setups) > 1 else ""

        def say(decisions: int, arrived: int, prefix: str = prefix) -> None:
            progress.say(f"{prefix}{arrived:,} of {len(trace):,} requests have arrived, {decisions:,} decisions")

        with ExitStack() as stack:
            log = stack.enter_context(create(log_path)) if log_path else None
            run = Simulation(trace, setup, say, log).run()
        runs.append(run)
        hits = infinite_cache_hits(trace, setup.config.block_size)
        summaries.append(summarize(run, slo, hits / sum(request.input_length for request in trace)))
    print(render([summary.label for summary in summaries], summary_rows(summaries)))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode({"notes": notes, "runs": summaries})))
    if arguments.html is not None:
        arguments.html.write_text(page(f"Simulation of {arguments.trace.name}", notes, runs, summaries), "utf-8")
    return 0


def _cost(text: str) -> tuple[StepCost, str]:
    """Costs and where they come from."""
    if not text.startswith("fit:"):
        return parse_cost(text), "the default" if text == str(DEFAULT_COST) else "given"
    fit = cost_from_log(Path(text.removeprefix("fit:")))
    return fit.cost, f"fitted to {fit.steps:,} steps, median error {fit.median_error:.1%}"


def _setup(arguments: argparse.Namespace, trace: list[TraceRequest], variant: Variant, cost: StepCost) -> Setup:
    block_size = variant.config.block_size
    longest = max(request.input_length + request.output_length for request in trace)
    if variant.kv_tokens is None:
        # One block more for each request, whose last one is not full: nothing is ever evicted.
        blocks = sum(-(-(request.input_length + request.output_length) // block_size) + 1 for request in trace)
    else:
        blocks = variant.kv_tokens // block_size
        if blocks == 0:
            raise UsageError(f"--kv-tokens {variant.kv_tokens}: must hold one block of {block_size}")
    return Setup(
        label=variant.label,
        config=variant.config,
        num_blocks=blocks,
        num_host_blocks=variant.host_blocks,
        max_model_len=arguments.max_model_len or longest,
        batching=variant.batching,
        cost=cost,
        copy_us=arguments.copy_us,
    )


if __name__ == "__main__":
    sys.exit(main())
