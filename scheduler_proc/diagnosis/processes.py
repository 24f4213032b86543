"""What the processes around the engine do: their CPU, how late their loops are, and what a prompt waits for in them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from ipc.messages import ClientReport
from ipc.stats_messages import ProcessUsage, TokenizerWork

_NO_WORK = TokenizerWork(0, 0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0.0, 0.0)


class _Use(NamedTuple):
    """Since the start of a process: seconds, looks, seconds."""

    cpu: float
    looks: int
    lag: float


class _Sample(NamedTuple):
    time: float
    uses: dict[str, _Use]
    clients: Sequence[ClientReport]
    work: TokenizerWork  # of all tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Means over the window. `cores`: of the busiest process of a role, 1.0 is one core without a pause."""

    tokenizer_cores: float = 0.0
    frontend_cores: float = 0.0
    scheduler_cores: float = 0.0
    worker_cores: float = 0.0
    tokenizer_lag: float = 0.0  # seconds that its event loop is late
    frontend_lag: float = 0.0
    encode: float = 0.0  # seconds of a prompt
    encode_wait: float = 0.0  # before that, for a thread
    render: float = 0.0  # seconds of a request's chat template,
    grammar: float = 0.0  # and of its grammar, waiting for others included; means over all prompts
    child_wait: float = 0.0  # of the last two, the waiting for others
    detokenize_cores: float = 0.0  # that turning tokens into text takes, of all tokenizers together
    backlog: float = 0.0  # bytes that wait for clients which do not read them
    slow_clients: float = 0.0  # so many

    @property
    def front(self) -> float:
        """Seconds that a request takes before the scheduler has it, and its first token after that."""
        prepared = self.encode + self.encode_wait + self.render + self.grammar
        return prepared + 2 * (self.tokenizer_lag + self.frontend_lag)


class Processes:
    """Keeps what they report, for as long as a diagnosis looks back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[_Sample] = deque()

    def take(
        self,
        now: float,
        usages: Sequence[ProcessUsage],
        work: Sequence[TokenizerWork],
        clients: Sequence[ClientReport] = (),
    ) -> None:
        """Reports as they are now; once a second is enough."""
        columns = zip(*(_numbers(part) for part in (_NO_WORK, *work)), strict=True)
        total = TokenizerWork(*(sum(values) for values in columns))
        uses = {usage.name: _Use(usage.cpu_seconds, sum(usage.lags), usage.lag_seconds) for usage in usages}
        uses |= {client.name: _Use(client.cpu_seconds, client.lag_looks, client.lag_seconds) for client in clients}
        self._samples.append(_Sample(now, uses, clients, total))
        while now - self._samples[0].time > self._seconds:
            self._samples.popleft()

    def cpu(self) -> Cpu:
        """Between the oldest report and the newest; zeros while there are no two."""
        if len(self._samples) < 2 or self._samples[-1].time <= self._samples[0].time:
            return Cpu()
        first, last = self._samples[0], self._samples[-1]
        cores: dict[str, float] = {}
        lags: dict[str, float] = {}
        for name, use in last.uses.items():
            began, before = next((sample.time, sample.uses[name]) for sample in self._samples if name in sample.uses)
            seconds = last.time - began
            if seconds <= 0 or use.cpu < before.cpu:
                continue  # it has told once, or begun anew
            role = name.partition("-")[0]
            cores[role] = max(cores.get(role, 0.0), (use.cpu - before.cpu) / seconds)
            if use.looks > before.looks:
                lags[role] = max(lags.get(role, 0.0), (use.lag - before.lag) / (use.looks - before.looks))
        done, was = last.work, first.work
        prompts = done.prompts - was.prompts
        each = 1 / prompts if prompts > 0 else 0.0
        return Cpu(
            tokenizer_cores=cores.get("tokenizer", 0.0),
            frontend_cores=cores.get("frontend", 0.0),
            scheduler_cores=cores.get("scheduler", 0.0),
            worker_cores=cores.get("worker", 0.0),
            tokenizer_lag=lags.get("tokenizer", 0.0),
            frontend_lag=lags.get("frontend", 0.0),
            encode=each * (done.encode_seconds - was.encode_seconds),
            encode_wait=each * (done.encode_wait_seconds - was.encode_wait_seconds),
            render=each * (done.render_seconds - was.render_seconds),
            grammar=each * (done.grammar_seconds - was.grammar_seconds),
            child_wait=each * (done.child_wait_seconds - was.child_wait_seconds),
            detokenize_cores=max(0.0, done.detokenize_seconds - was.detokenize_seconds) / (last.time - first.time),
            backlog=fmean(sum(client.backlog for client in sample.clients) for sample in self._samples),
            slow_clients=fmean(sum(client.slow for client in sample.clients) for sample in self._samples),
        )


def _numbers(work: TokenizerWork) -> tuple[float, ...]:
    return tuple(getattr(work, name) for name in work.__struct_fields__)
