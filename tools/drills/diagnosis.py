"""Servers of which something is wrong for their load: whether the diagnosis names the change that helps most."""

import asyncio
import itertools
import json
import os
import random
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from config.bytesize import format_size
from config.resolve import Resolved
from frontend.diagnosis import CauseObject, DiagnosisObject
from ipc.stats_messages import MetricName
from scheduler_proc.diagnosis.evidence import flag
from tools.doctor.report import amount
from tools.drills.kv import resolved
from tools.drills.scenarios import NAMES, Scenario, scenario
from tools.drills.server import Reply, complete, http, running
from tools.drills.starving import starved
from tools.drills.verdicts import LEAST, NOTHING, gain, is_right

HELP = """\
Each scenario is a closed loop of clients on a server of which one thing, or two, is wrong; which ones and how much is
drawn from --seed. Under that load the server is asked for a diagnosis. Then a server is started with each single change
that could matter, under the same load, and with the change that is advised first for the scenario's metric.

The truth is the change that, applied alone, improves the metric most as clients measure it: at least 1.1 times, and
not at the cost of another one. The advice is right when it gains as much, to a tenth (of the logarithm). What it costs
may be a quarter above the limits, since that is measured too; the row says so then. Which changes
are tried does not depend on what is advised. Each is measured for half of --seconds, or for longer, until each client
has had three first tokens; then the two that looked best, and
the one that is advised, are measured again, and the server as it is after them. Only that counts, in every scenario:
the best of many has been lucky. Where the best of these gains so little that chance may decide whether it is a gain at
all, all of them are measured once or twice more, and means count.

Beside settings, "client" (it reads at once) and "load" (twice as many clients) are changes too.

All scenarios take 40 minutes to an hour on two cores with --seconds 10.
"""

_FINALISTS = 2  # changes that are measured again, beside the advised one
_MOST_ROUNDS = 3  # of measuring those
_DOUBT = 1.25  # about what an advice costs: two measurements of one server's TTFT differ by as much
_UNCLEAR = (1.05, 1.25)  # gains by which it is not decided whether any change is one
_SCREENED = 0.5  # of the seconds, for the measurement that says which these are
_LEAST_FIRSTS = 3  # first tokens that each client gets while it is measured: a mean over fewer long requests is luck
_MOST_SPANS = 5  # times as long is measured, where that takes longer
_WARM_UP = 3.0  # seconds of load that are not measured
_FOR_P99 = 100  # observations
_CROWDED = 0.5  # of the KV pool's tokens, that the clients' requests have together: from here on more may help
_BUFFER = 4096  # bytes, of a client that reads slowly
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "for", "on", "as", "with", "this", "was", "at", "by")


@dataclass(frozen=True)
class Run:
    """What clients measured: seconds, and output tokens a second."""

    metrics: dict[MetricName, float]
    longest_gap: float  # all but one in a thousand gaps are shorter: the very longest is a matter of chance


@dataclass(frozen=True)
class Change:
    """One thing that is done differently; `name` is a flag, "client" or "load"."""

    name: str
    value: str
    scenario: Scenario

    def __str__(self) -> str:
        return flag(self.name, self.value) if self.name.startswith("--") else self.name


@dataclass
class Trial:
    """One scenario, with all that was measured."""

    name: str
    scenario: Scenario
    before: list[Run]
    told: DiagnosisObject
    screened: dict[Change, Run] = field(default_factory=dict)  # by which it is decided what is measured again
    after: dict[Change, list[Run]] = field(default_factory=dict)  # by which truth and advice are judged

    def finalists(self) -> list[Change]:
        """What looked best, and the advice. Whether they agree has no part in it: luck is as likely in both cases."""
        metric, before = self.scenario.metric, mean(self.before)
        advice = self._advice()
        ordered = sorted(self.screened, key=lambda change: gain(metric, before, self.screened[change]), reverse=True)
        found = ordered[:_FINALISTS]
        return found if advice is None or advice in found else [*found, advice]

    def _advice(self) -> Change | None:
        """None where no change is advised, or none that can be made."""
        cause = self.cause
        if cause is not None and cause.setting and cause.after:
            return change_of(self.scenario, cause.setting, cause.after)
        return next((change for change in self.screened if cause and change.name == cause.cause), None)

    def gain(self, change: Change) -> float:
        """The advice has the benefit of the doubt, where its price is close to a limit."""
        doubt = _DOUBT if change == self.advised else 1.0
        return gain(self.scenario.metric, mean(self.before), mean(self.after[change]), doubt)

    @property
    def is_close(self) -> bool:
        """Whether the advice is a gain by the benefit of the doubt alone."""
        advised = self.advised
        if advised is None:
            return False
        sure = gain(self.scenario.metric, mean(self.before), mean(self.after[advised]))
        return sure < self.gain(advised)

    @property
    def cause(self) -> CauseObject | None:
        """What is ranked first; none where the metric was not diagnosed."""
        return first_advice(self.told, self.scenario.metric)

    @property
    def advised(self) -> Change | None:
        """Of those that were measured."""
        cause = self.cause
        if cause is None:
            return None
        named = (cause.setting, cause.after) if cause.setting else (cause.cause, "")
        return next((change for change in self.after if (change.name, change.value) == named), None)

    @property
    def best(self) -> Change | None:
        """None where none gains enough."""
        found = max(self.after, key=self.gain, default=None)
        return found if found is not None and self.gain(found) >= LEAST else None

    @property
    def is_unclear(self) -> bool:
        """Whether chance may decide if any change helps. What is advised has no part in this either."""
        return bool(self.after) and _UNCLEAR[0] < max(map(self.gain, self.after)) < _UNCLEAR[1]

    @property
    def is_right(self) -> bool:
        best, advised = self.best, self.advised
        if advised is None and self.cause is not None and self.cause.cause == "client":
            return False  # clients that read at once are no cause
        return is_right(
            best.name if best else NOTHING,
            self.gain(best) if best else 1.0,
            advised.name if advised else NOTHING,
            self.gain(advised) if advised else 1.0,
        )

    @property
    def predicted(self) -> float:
        """The metric as clients would measure it with the advice: what a server measures is not quite that."""
        cause = self.cause
        before = mean(self.before).metrics[self.scenario.metric]
        [value] = [metric.value for metric in self.told.metrics if metric.name == self.scenario.metric] or [before]
        return before * cause.predicted / value if cause else before


async def run(options: Namespace) -> None:
    """Print a line for each scenario that was asked for, and how truth and advice meet."""
    columns = f"{'scenario':26} {'metric':10} {'before':>14}  {'best change':28} {'first advice':28}"
    print(f"{columns} {'predicted':>14} {'measured':>14} {'error':>6}")
    trials = []
    for name in options.scenarios or NAMES:
        trial = await _try(name, options)
        trials.append(trial)
        print(_line(trial), flush=True)
        if options.json:
            await asyncio.to_thread(_write, options.json, json.dumps(_record(trial, options.seed)) + "\n")
    print(f"\n{sum(trial.is_right for trial in trials)} of {len(trials)} right\n\n{_confusion(trials)}")


async def _try(name: str, options: Namespace) -> Trial:
    given = scenario(name, options.seed)
    first, told = await _measure(given, 2 * options.seconds, options)
    trial = Trial(name, given, [first], told)
    _, settings = resolved(options.model, *given.flags)
    for change in changes(given, settings, first):
        trial.screened[change], _ = await _measure(change.scenario, _SCREENED * options.seconds, options)
    finalists = trial.finalists()
    for _ in range(_MOST_ROUNDS):
        for change in finalists:
            run, _ = await _measure(change.scenario, options.seconds, options)
            trial.after.setdefault(change, []).append(run)
        run, _ = await _measure(given, options.seconds, options)
        trial.before.append(run)
        if not trial.is_unclear:
            break
    return trial


def first_advice(told: DiagnosisObject, name: MetricName) -> CauseObject | None:
    """None where the metric was not diagnosed."""
    return next((metric.causes[0] for metric in told.metrics if metric.name == name), None)


def change_of(given: Scenario, name: str, value: str) -> Change:
    """One setting at another value."""
    return Change(name, value, replace(given, flags=changed(given.flags, name, value)))


def changes(given: Scenario, settings: Resolved, before: Run) -> list[Change]:
    """Every single change that can act on what this scenario is made of. `before`: as its clients measured it.

    What the diagnosis says has no part in this: it would choose what it is compared with.
    """
    found = [change_of(given, name, value) for name, value in dict.fromkeys(_settings(given, settings, before))]
    if given.reads:
        found.append(Change("client", "", replace(given, reads=0.0)))
    if given.metric == "throughput":
        found.append(Change("load", "", replace(given, clients=2 * given.clients)))
    return found


def _settings(given: Scenario, settings: Resolved, before: Run) -> Iterable[tuple[str, str]]:
    """Flags and values that somebody might try."""
    config = settings.config
    seqs, tokens = config.scheduler.max_seqs, config.scheduler.max_step_tokens
    assert seqs is not None
    assert tokens is not None
    if given.clients > seqs:
        yield "--max-seqs", str(given.clients)
    if given.clients * (given.shared + max(given.prompt, given.long)) > tokens:
        yield "--max-step-tokens", str(4 * tokens)
    if given.clients > 1:
        yield from _for_steadier_streams(given, tokens, before)
    each = given.prompt + given.outputs + (0 if config.scheduler.prefix_cache else given.shared)
    pool = settings.plan.num_blocks * config.scheduler.block_size
    if given.clients * each > _CROWDED * pool:
        yield "--kv-memory", format_size(4 * settings.plan.num_blocks * settings.plan.block_bytes).replace(" ", "")
        yield "--kv-dtype", "int8"
    if not config.scheduler.prefix_cache:
        yield "--prefix-cache", "on"
    if given.as_text or given.starved or given.fields or given.metric == "ttft":
        yield "--tokenizers", "2"
        yield "--frontends", "2"
    if "--threads" in given.flags:
        yield "--threads", str(os.cpu_count())
    if config.model.quantization == "none":
        yield "--quantization", "auto"


def _for_steadier_streams(given: Scenario, tokens: int, before: Run) -> Iterable[tuple[str, str]]:
    """What makes prompts and streams wait for each other less; fewer requests at once make each one faster."""
    if given.metric == "throughput":
        return
    yield "--prefer", "decode"
    yield "--prefer", "prefill"
    if given.metric.startswith("itl"):
        yield "--max-itl-ms", str(max(1, round(2e3 * before.metrics["itl"])))
        yield "--max-step-tokens", str(max(64, tokens // 4))
        yield "--max-seqs", str(max(1, given.clients // 2))
        if given.long:
            yield "--long-prompt-tokens", str(given.long // 4)


def changed(flags: Sequence[str], setting: str, value: str) -> tuple[str, ...]:
    """The command line with one setting changed."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        if word == setting:
            next(words, None)
        elif word not in (flag(setting, "on"), flag(setting, "off")):
            kept.append(word)
    return (*kept, *(() if value == "none" else flag(setting, value).split()))


# --- load ---


async def _measure(given: Scenario, seconds: float, options: Namespace) -> tuple[Run, DiagnosisObject]:
    """What clients see in `seconds`, or longer where one needs that; and what the server finds."""
    by_client: list[list[Reply]] = [[] for _ in range(given.clients)]
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(running(options.model, *given.flags))
        asking = await stack.enter_async_context(http())
        session = await stack.enter_async_context(http(_BUFFER if given.reads else 0))
        if given.starved:
            await stack.enter_async_context(starved(found.pid, given.starved, given.share))
        clients = [
            asyncio.create_task(_client(session, found.url, given, number, replies))
            for number, replies in enumerate(by_client)
        ]
        await asyncio.sleep(_WARM_UP)
        begun = ended = time.perf_counter()
        for _ in range(_MOST_SPANS):
            await asyncio.sleep(seconds)
            ended = time.perf_counter()
            if has_enough(by_client, begun, ended):
                break
        async with asking.get(found.url + "/diagnose") as response:
            response.raise_for_status()
            told = msgspec.json.decode(await response.read(), type=DiagnosisObject)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    replies = [*itertools.chain.from_iterable(by_client)]
    if failed := next((reply for reply in replies if reply.status not in (0, 200) or reply.error), None):
        raise SystemExit(f"a request failed: {failed.status} {failed.error}")
    return seen(replies, begun, ended), told


async def _client(session: aiohttp.ClientSession, url: str, given: Scenario, number: int, replies: list[Reply]) -> None:
    """One request after the other until it is cancelled, or one fails; the same ones whatever the flags.

    Outputs of one length would have all clients begin and end together, now and then, and for as long as they run.
    """
    draw = random.Random(number)
    shared = [random.Random(0).randrange(100, 40000) for _ in range(given.shared)]
    length = given.long if given.long and number == 0 else given.prompt
    while True:
        reply = Reply(0.0)
        replies.append(reply)
        prompt: list[int] | str = shared + [draw.randrange(100, 40000) for _ in range(length)]
        if given.as_text:
            prompt = " ".join(draw.choice(_WORDS) for _ in range(length))
        fields = {"guided_json": _schema(draw, given.fields)} if given.fields else {}
        outputs = max(1, round(given.outputs * draw.uniform(0.5, 1.5)))
        await complete(session, url, prompt, outputs, reply, given.reads, **fields)
        if not reply.finished:
            return
        await asyncio.sleep(given.think)


def _schema(draw: random.Random, fields: int) -> str:
    """A JSON schema like no other one, of so many fields; what it allows is longer than any answer."""
    names = [f"field_{draw.randrange(1 << 40):x}" for _ in range(fields)]
    kinds: list[dict[str, Any]] = [{"type": "string", "maxLength": 40}, {"type": "integer"}, {"type": "boolean"}]
    properties = {name: draw.choice(kinds) for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


def has_enough(by_client: Iterable[Sequence[Reply]], begun: float, ended: float) -> bool:
    """Whether each client has had some first tokens, and a gap between tokens, between the two moments."""
    return all(
        len(_firsts(replies, begun, ended)) >= _LEAST_FIRSTS and _gaps(replies, begun, ended) for replies in by_client
    )


def _firsts(replies: Sequence[Reply], begun: float, ended: float) -> list[float]:
    return sorted(reply.ttft for reply in replies if reply.times and begun <= reply.times[0] < ended)


def _inside(replies: Sequence[Reply], begun: float, ended: float) -> list[list[float]]:
    return [[time for time in reply.times if begun <= time < ended] for reply in replies]


def _gaps(replies: Sequence[Reply], begun: float, ended: float) -> list[float]:
    inside = _inside(replies, begun, ended)
    return sorted(after - before for times in inside for before, after in itertools.pairwise(times))


def seen(replies: Sequence[Reply], begun: float, ended: float) -> Run:
    """The metrics of what came between two moments; SystemExit where nothing did."""
    firsts, gaps = _firsts(replies, begun, ended), _gaps(replies, begun, ended)
    if not firsts or not gaps:
        raise SystemExit("the time was too short for a request: --seconds")
    metrics: dict[MetricName, float] = {
        "ttft": statistics.fmean(firsts),
        "itl": statistics.fmean(gaps),
        "throughput": sum(map(len, _inside(replies, begun, ended))) / (ended - begun),
    }
    if len(firsts) >= _FOR_P99:
        metrics["ttft_p99"] = firsts[int(0.99 * len(firsts))]
    if len(gaps) >= _FOR_P99:
        metrics["itl_p99"] = gaps[int(0.99 * len(gaps))]
    return Run(metrics, gaps[int(0.999 * len(gaps))])


def mean(runs: Sequence[Run]) -> Run:
    """Of several runs of the same; of what all of them have."""
    names = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    return Run(
        {name: statistics.fmean(run.metrics[name] for run in runs) for name in names},
        statistics.fmean(run.longest_gap for run in runs),
    )


# --- the table ---


def _line(trial: Trial) -> str:
    metric = trial.scenario.metric
    before = mean(trial.before).metrics[metric]
    best, advised, cause = trial.best, trial.advised, trial.cause
    found = f"{best} x{trial.gain(best):.2f}" if best else "none"
    text = f"{trial.name:26} {metric:10} {amount(metric, before):>14}  {found:28} "
    if cause is None or advised is None:
        return f"{text}{f'none ({cause.cause})' if cause else 'none':60}{_mark(trial)}"
    after = mean(trial.after[advised]).metrics[metric]
    if not advised.name.startswith("--"):  # what is predicted then is something else: the most, or no effect
        return f"{text}{advised!s:28} {'':>14} {amount(metric, after):>14} {'':6}{_mark(trial)}"
    return (
        f"{text}{advised!s:28} {amount(metric, trial.predicted):>14} {amount(metric, after):>14} "
        f"{trial.predicted / after - 1:+6.0%}{_mark(trial)}"
    )


def _mark(trial: Trial) -> str:
    return f"{'' if trial.is_right else '  WRONG'}{'  (its price is close to a limit)' if trial.is_close else ''}"


def _confusion(trials: Sequence[Trial]) -> str:
    """How often which change was advised first, by the best one."""
    pairs = Counter(
        (trial.best.name if trial.best else "none", trial.advised.name if trial.advised else "none") for trial in trials
    )
    rows = [f"{'best change':20} {'first advice':20} {'runs':>4}"]
    rows += [f"{best:20} {advised:20} {count:4}" for (best, advised), count in sorted(pairs.items())]
    return "\n".join(rows)


def _write(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _record(trial: Trial, seed: int) -> dict[str, Any]:
    """All that was measured, for a line of JSON."""
    return {
        "name": trial.name,
        "seed": seed,
        "scenario": msgspec.to_builtins(trial.scenario),
        "screened": {str(change): msgspec.to_builtins(run) for change, run in trial.screened.items()},
        "before": [msgspec.to_builtins(run) for run in trial.before],
        "after": {str(change): [msgspec.to_builtins(run) for run in runs] for change, runs in trial.after.items()},
        "gains": {str(change): trial.gain(change) for change in trial.after},
        "diagnosis": msgspec.to_builtins(trial.told),
        "right": trial.is_right,
    }
