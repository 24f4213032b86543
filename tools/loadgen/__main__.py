"""`python -m tools.loadgen`: replay a trace against a server. See docs/loadgen.md."""

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Sequence

import msgspec

from config.output_files import check_apart, check_output
from config.sources import ConfigError
from tools.arguments import end_with
from tools.loadgen.options import build_parser
from tools.loadgen.page import run_page, search_page
from tools.loadgen.report import PROBE_LABELS, found_rows, probe_rows, text_report
from tools.loadgen.runner import Run, RunError
from tools.loadgen.search import check_search, open_notes, search, short_notes
from tools.loadgen.servers import ServerError
from tools.loadgen.session import Load, Session, UsageError, read_load, schedule_of
from tools.loadgen.summary import Summary
from tools.loadgen.words import WordsError
from tools.reports.table import render
from tools.traces import TraceError

_NOTHING_ANSWERED, _WRONG_INPUT, _VOID, _INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(argv)
    arguments.command = shlex.join(["python", "-m", "tools.loadgen", *argv])
    try:
        for flag in ("records", "json", "html"):
            if (output := getattr(arguments, flag)) is not None:
                check_output(f"--{flag}", output)
        check_apart({f"--{name}": getattr(arguments, name) for name in ("trace", "records", "json", "html")})
        load = read_load(arguments)
        return asyncio.run((_search if arguments.find_rate else _run)(arguments, load, Session(arguments)))
    except (ConfigError, UsageError, TraceError, ServerError, WordsError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
    return _WRONG_INPUT


async def _run(arguments: argparse.Namespace, load: Load, session: Session) -> int:
    schedule = schedule_of(arguments, load)
    await session.prepare(load)
    print("\n".join(session.notes), flush=True)
    with session.recording():
        run, summary = await session.run(schedule)
    ending = [*_ending(run), *_unwritten(session)]
    notes = [*session.notes, *ending]
    print("\n".join([*ending, "", text_report("this run", summary)]), flush=True)  # first: files may fail
    if arguments.json is not None:
        _write_json(arguments, {"notes": notes, **_facts(session, run), "summary": summary})
    if arguments.html is not None:
        page = run_page(_title(arguments), [*notes, _origin(arguments, run)], run.records, summary)
        arguments.html.write_text(page, "utf-8")
    return _WRONG_INPUT if session.unwritten else _status(run, summary)


async def _search(arguments: argparse.Namespace, load: Load, session: Session) -> int:
    check_search(arguments, load)
    await session.prepare(load)
    print("\n".join(session.notes), flush=True)
    with session.recording():
        done = await search(arguments, load, session)
    limits = [*open_notes(arguments, load, done), *short_notes(arguments, load, done)]
    if done.probes:
        print("\n" + render(PROBE_LABELS, probe_rows(done.probes)))
        print("\n" + render(["rate"], found_rows(done.results)), flush=True)
    print("\n".join([*limits, *_unwritten(session)]), flush=True)
    if done.failure:
        print(f"error: {done.failure}", file=sys.stderr)
    notes = [*session.notes, *limits, *([done.failure] if done.failure else [])]
    if arguments.json is not None:
        best = done.best[1] if done.best else None
        _write_json(arguments, {"notes": notes, "probes": done.probes, "found": done.results, "best": best})
    if arguments.html is not None:
        best_run = (done.best[0].records, done.best[1]) if done.best else None
        notes = [*notes, *([_origin(arguments, done.best[0])] if done.best else [])]
        page = search_page(_title(arguments), notes, done.probes, done.results, best_run)
        arguments.html.write_text(page, "utf-8")
    if session.unwritten:
        return _WRONG_INPUT
    if done.interrupted:
        return _INTERRUPTED
    if done.failure or not done.answered:
        return _NOTHING_ANSWERED
    return _VOID if all(probe.void for probe in done.probes) else 0


def _ending(run: Run) -> list[str]:
    if not run.interrupted:
        return []
    left = len(run.schedule.items) - sum(record.outcome != "cancelled" for record in run.records)
    return [f"interrupted: {left:,} requests were not sent or not waited for"]


def _unwritten(session: Session) -> list[str]:
    return [f"--records: {session.unwritten}: the file is not complete"] if session.unwritten else []


def _facts(session: Session, run: Run) -> dict[str, object]:
    return {
        "run_id": session.run_id,
        "started_unix": run.started_unix,
        "started_monotonic": run.started_monotonic,
        "interrupted": run.interrupted,
    }


def _origin(arguments: argparse.Namespace, run: Run) -> str:
    """When it was and how to do it again; the key of the server is no part of the command."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(run.started_unix))}: {arguments.command}"


def _title(arguments: argparse.Namespace) -> str:
    return f"Load of {arguments.trace.name if arguments.trace else 'synthetic requests'}"


def _write_json(arguments: argparse.Namespace, report: dict[str, object]) -> None:
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _status(run: Run, summary: Summary) -> int:
    if run.interrupted:
        return _INTERRUPTED
    if not summary.outcomes.get("ok"):
        return _NOTHING_ANSWERED
    return _VOID if summary.client.void else 0


if __name__ == "__main__":
    end_with(main)
