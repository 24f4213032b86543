"""One step of the model: prepare -> forward -> sample, with the plan's block copies beside it.

What does not belong here: index arithmetic (`prepare`, or the backend's own), what is known of a row (`rows`,
`sampler_state`), the mathematics of sampling (`sampling`), log-probabilities of prompts (`prompt_scores`), embeddings
(`pooling`), copies and their thread (`block_copier`), anything about a model or a device (`models`, `backends`),
sockets and processes (`main`). Nothing here decides what runs: the scheduler does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from config.schema import ModelArch
from gpu_workers.backend import Backend
from gpu_workers.block_copier import BlockCopier
from gpu_workers.clock import Mark
from gpu_workers.comm import Comm
from gpu_workers.drawn import Drawn, Known
from gpu_workers.grammars import Grammars
from gpu_workers.pooling import Pooler
from gpu_workers.prompt_scores import PromptScorer
from gpu_workers.rows import Ints, PlanError, Rows
from gpu_workers.sampler_state import SamplerState
from ipc.engine_messages import NewRow, PromptScores, RowFailure, StepPlan, StepResult


class Model(Protocol):
    """What a step needs of a model (`gpu_workers.models`)."""

    arch: ModelArch
    backend: Backend

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        """[S, vocab] float32 logits of a batch that the backend has prepared, good until the next forward."""

    def best_ids(self, batch: Any, kv: Any) -> NDArray[np.int64]:
        """With one rank, instead: the ids [S] of the largest logits, the lowest one of equals.

        Raises FloatingPointError on NaN.
        """

    def capture(self, rows: Rows, kv: Any, sequences: Sequence[int], progress: Callable[[float], None]) -> None:
        """See `Backend.capture`."""

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, vocab] float32 logits of other flat tokens of the batch that was run last, good until the next call."""

    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, hidden] float32: what the logits of such tokens are made of, good until the next call."""


def _no_rows() -> NDArray[Any]:
    return np.empty(0, dtype=np.int64)


class _OfRows(Protocol):
    """What is kept of each row."""

    def free(self, rows: list[int]) -> None: ...

    def add(self, new: NewRow) -> None: ...


@dataclass(slots=True, eq=False)
class Step:
    """A plan on its way through the runner; times are marks of the backend's clock."""

    plan: StepPlan
    copied: Callable[[], None]  # waits for the plan's copies
    started: Mark
    prepared: Mark = None
    batch: Any = None  # None: nothing is computed
    sampling_rows: Ints = field(default_factory=_no_rows)  # [S], as are the next two
    uses: NDArray[np.int64] = field(default_factory=_no_rows)  # which of the rows' requests these are
    positions: NDArray[np.int64] = field(default_factory=_no_rows)  # where the sampled tokens go in their rows
    masks_begun: bool = False
    logits: torch.Tensor | None = None  # until they are sampled from
    forward: Mark = None
    drawn: Drawn | None = None  # None: not sampled yet
    sampled: Mark = None
    scores: Callable[[], tuple[PromptScores, ...]] = tuple  # waits for them
    embeddings: tuple[bytes, ...] = ()
    ended: Mark = None


class Runner:
    """Carries out plans on one rank, with the state of up to `max_seqs` requests.

    `kv` is what the model allocated for `num_blocks` blocks of `block_size` positions, `host_kv` what its backend
    allocated for `num_host_blocks` of them in host memory. All ranks are given the same plans; with several, rank 0
    samples and tells the others. `grammars` is for the rank that samples; without it, rows are free.
    """

    def __init__(
        self,
        model: Model,
        kv: Any,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        comm: Comm,
        host_kv: Any = None,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._comm = comm
        self._device = model.backend.device
        self._rows = Rows(max_seqs, max_model_len, num_blocks, block_size, model.arch.vocab_size)
        self._sampler = SamplerState(max_seqs, model.arch.vocab_size)
        self._scorer = PromptScorer(self._rows)
        self._pooler = Pooler()
        self._grammars = grammars
        self._copier = BlockCopier(model.backend, kv, num_blocks, host_kv, num_host_blocks)
        self._clock = model.backend.clock
        self._ended = self._clock.mark()
        self._last: Step | None = None
        self._unknown: Step | None = None  # the one whose tokens are not in the rows yet

    def capture(self, sequences: Sequence[int], progress: Callable[[float], None]) -> None:
        """See `Backend.capture`; before the first plan."""
        self._model.capture(self._rows, self._kv, sequences, progress)

    @property
    def overlaps(self) -> bool:
        """Whether the next plan may be launched before this one is collected."""
        return self._model.backend.overlaps

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step and its copies; its result on rank 0, None on the others.

        Raises `PlanError` when the plan does not follow the last one or does not fit the rows or pools,
        FloatingPointError when the model computed NaN. The runner is of no use after either.
        """
        step = self.launch(plan)
        self.sample(step)
        return self.collect(step)

    def launch(self, plan: StepPlan) -> Step:
        """Start a step's copies and its forward; raises `PlanError`.

        Where that needs nothing that the device has not told yet, sample as well. A backend that overlaps may have one
        earlier step that is not collected: that has to be done between `launch` and `sample`.
        """
        if self._last is not None:
            if plan.step != self._last.plan.step + 1:
                raise PlanError(f"step {plan.step} was planned after step {self._last.plan.step}")
            self._last.copied()  # this forward may read or write the blocks
        step = self._last = Step(plan, self._copier.start(plan), started=self._clock.mark())
        with _waiting_on_error(step):
            self._launch(step)
        return step

    def _launch(self, step: Step) -> None:
        plan = step.plan
        self._update(plan)
        prepared = self._model.backend.prepare(self._rows, plan.scheduled)
        step.prepared = self._clock.mark()
        if prepared is None:
            return
        rows = step.sampling_rows = prepared.sampling_rows
        step.uses, step.positions = self._rows.uses[rows], self._rows.num_tokens[rows]
        step.batch = prepared.batch
        if self._unknown is None:
            self._begin_masks(step)
        self._forward(step)
        step.forward = self._clock.mark()
        if self._unknown is None or not self._needs_last_tokens(rows):
            self._sample(step)

    def _update(self, plan: StepPlan) -> None:
        freed = self._rows.update(plan).tolist()
        kept: tuple[_OfRows | None, ...] = self._sampler, self._scorer, self._pooler, self._grammars
        for each in kept:
            if each is None:
                continue
            each.free(freed)
            for new in plan.new_rows:
                each.add(new)

    def _forward(self, step: Step) -> None:
        """The logits; or the tokens at once where all are greedy, and the model need not keep the logits."""
        if not self.overlaps and self._comm.size == 1 and self._sampler.all_plain(step.sampling_rows):
            step.drawn = Known(self._model.best_ids(step.batch, self._kv))
        else:
            step.logits = self._model.forward(step.batch, self._kv)

    def _needs_last_tokens(self, rows: Ints) -> bool:
        """Whether what may be sampled next in these rows depends on the tokens sampled last."""
        return self._sampler.needs_last_tokens(rows) or (self._grammars is not None and self._grammars.any_of(rows))

    def _begin_masks(self, step: Step) -> None:
        if self._grammars is not None and not step.masks_begun:
            self._grammars.begin(step.sampling_rows)
            step.masks_begun = True

    def sample(self, step: Step) -> None:
        """Sample after the forward, unless `launch` did; and what else is read from the forward."""
        if step.batch is not None and step.sampled is None:
            with _waiting_on_error(step):
                self._sample(step)

    @torch.inference_mode()
    def _sample(self, step: Step) -> None:
        rows = step.sampling_rows
        if step.drawn is None:
            assert step.logits is not None
            self._begin_masks(step)
            step.drawn = self._draw(step, step.logits)
            step.logits = None
        self._rows.append(rows, None if self.overlaps else np.maximum(step.drawn.result()[0], 0))
        step.sampled = self._clock.mark()
        scheduled = step.plan.scheduled
        step.scores = self._scorer.scores(
            scheduled, self._model.more_logits, self._model.backend, keep=self._comm.rank == 0
        )
        if self._comm.rank == 0:
            step.embeddings = self._pooler.embeddings(scheduled, self._model.hidden_states)
        step.ended = self._clock.mark()
        self._unknown = step

    def _draw(self, step: Step, logits: torch.Tensor) -> Drawn:
        rows = step.sampling_rows
        if not len(rows):
            return Known(np.zeros(0, dtype=np.int64))
        drawn: Drawn = Known(np.zeros(len(rows), dtype=np.int64))
        if self._comm.rank == 0:
            settings = mask = None
            if not self._sampler.all_plain(rows):
                settings = self._sampler.batch(rows, step.positions - self._rows.num_prompt[rows])
                mask = self._grammars.mask() if self._grammars is not None else None
            drawn = self._model.backend.draw(logits, step.batch, settings, mask)
        if self._comm.size > 1:
            token_ids, logprobs = drawn.result()
            shared = self._comm.broadcast(torch.from_numpy(token_ids).to(self._device)).cpu().numpy()
            drawn = Known(shared, logprobs)
        return drawn

    def ready(self, step: Step) -> bool:
        """Whether `collect` would not wait for the device: a step that samples nothing has to be over, too."""
        return step.drawn is None or (step.drawn.ready() and self._clock.is_done(step.ended))

    def collect(self, step: Step) -> StepResult | None:
        """Wait for a step that was sampled; its result on rank 0, None on the others."""
        step.copied()
        if self._unknown is step:
            self._unknown = None
        if step.drawn is None:
            self._ended = step.prepared
            return StepResult(step=step.plan.step, token_ids=b"") if self._comm.rank == 0 else None
        token_ids, logprobs = step.drawn.result()
        scores = step.scores()
        rows = step.sampling_rows
        # Of what the plans after this one have freed, and given to others, nobody wants to know more.
        same = np.flatnonzero(self._rows.uses[rows] == step.uses)
        completed: tuple[int, ...] = ()
        failed: tuple[RowFailure, ...] = ()
        if self._grammars is not None and self._comm.rank == 0:
            completed, failed = self._grammars.take(rows, token_ids, same)
        # A row that can't go on keeps running in vain until the scheduler knows.
        token_ids = np.maximum(token_ids, 0)
        self._rows.learn(rows[same], step.positions[same], token_ids[same])
        self._sampler.record(rows[same], token_ids[same])
        since, self._ended = self._ended, step.ended
        if self._comm.rank != 0:
            return None
        microseconds = self._clock.microseconds
        return StepResult(
            step=step.plan.step,
            token_ids=token_ids.astype("<i4").tobytes(),
            logprobs=logprobs,
            completed=completed,
            failed=failed,
            between_us=microseconds(since, step.started),
            prepare_us=microseconds(step.started, step.prepared),
            forward_us=microseconds(step.prepared, step.forward),
            sample_us=microseconds(step.forward, step.sampled),
            prompt_scores=scores,
            score_us=microseconds(step.sampled, step.ended),
            embeddings=step.embeddings,
        )


@contextmanager
def _waiting_on_error(step: Step) -> Iterator[None]:
    """An error leaves only when the step's copies are complete, which read and write what may be freed then."""
    try:
        yield
    except BaseException:
        step.copied()
        raise
