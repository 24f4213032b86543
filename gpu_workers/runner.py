"""One step of the model: prepare -> forward -> sample, with the plan's block copies beside it.

What does not belong here: index arithmetic (`prepare`, or the backend's own), what is known of a row (`rows`,
`sampler_state`), the mathematics of sampling (`sampling`), log-probabilities of prompts (`prompt_scores`), embeddings
(`pooling`), copies and their thread (`block_copier`), anything about a model or a device (`models`, `backends`),
sockets and processes (`main`). Nothing here decides what runs: the scheduler does.
"""

import time
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from config.schema import ModelArch
from gpu_workers.backend import Backend
from gpu_workers.block_copier import BlockCopier
from gpu_workers.comm import Comm
from gpu_workers.grammars import Grammars
from gpu_workers.pooling import Pooler
from gpu_workers.prompt_scores import PromptScorer
from gpu_workers.rows import Ints, PlanError, Rows
from gpu_workers.sampler_state import SamplerState
from gpu_workers.sampling import argmax, sample
from ipc.engine_messages import RawLogprobs, RowFailure, StepPlan, StepResult


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

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, vocab] float32 logits of other flat tokens of the batch that was run last, good until the next call."""

    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, hidden] float32: what the logits of such tokens are made of, good until the next call."""


class _Sampled(NamedTuple):
    """What came of S sampling rows."""

    token_ids: NDArray[np.int64]  # [S]
    logprobs: tuple[RawLogprobs | None, ...] = ()  # S, or none
    completed: tuple[int, ...] = ()
    failed: tuple[RowFailure, ...] = ()


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
        self._last_step: int | None = None
        self._ended = time.perf_counter_ns()

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step and its copies; its result on rank 0, None on the others.

        Raises `PlanError` when the plan does not follow the last one or does not fit the rows or pools,
        FloatingPointError when the model computed NaN. The runner is of no use after either.
        """
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise PlanError(f"step {plan.step} was planned after step {self._last_step}")
        self._last_step = plan.step
        try:
            with self._copier.copying(plan):
                return self._step(plan)
        finally:
            self._ended = time.perf_counter_ns()

    def _step(self, plan: StepPlan) -> StepResult | None:
        started = time.perf_counter_ns()
        freed = self._rows.update(plan).tolist()
        self._sampler.free(freed)
        self._scorer.free(freed)
        self._pooler.free(freed)
        if self._grammars is not None:
            self._grammars.free(freed)
        for new in plan.new_rows:
            self._sampler.add(new)
            self._scorer.add(new)
            self._pooler.add(new)
            if self._grammars is not None:
                self._grammars.add(new)
        prepared = self._model.backend.prepare(self._rows, plan.scheduled)
        if prepared is None:
            return StepResult(step=plan.step, token_ids=b"") if self._comm.rank == 0 else None

        sampling_rows = prepared.sampling_rows
        prepare_done = time.perf_counter_ns()
        if self._grammars is not None:
            self._grammars.begin(sampling_rows)
        # Where all are greedy, the model need not keep the logits.
        if self._comm.size == 1 and self._sampler.all_plain(sampling_rows):
            sampled = _Sampled(self._model.best_ids(prepared.batch, self._kv))
            forward_done = time.perf_counter_ns()
        else:
            with torch.inference_mode():
                logits = self._model.forward(prepared.batch, self._kv)
                forward_done = time.perf_counter_ns()
                sampled = self._sample(logits, sampling_rows)
        token_ids = sampled.token_ids
        self._rows.append(sampling_rows, token_ids)
        self._sampler.record(sampling_rows, token_ids)
        sample_done = time.perf_counter_ns()
        scores = self._scorer.scores(plan.scheduled, self._model.more_logits, keep=self._comm.rank == 0)
        if self._comm.rank != 0:
            return None
        embeddings = self._pooler.embeddings(plan.scheduled, self._model.hidden_states)
        return StepResult(
            step=plan.step,
            token_ids=token_ids.astype("<i4").tobytes(),
            logprobs=sampled.logprobs,
            completed=sampled.completed,
            failed=sampled.failed,
            between_us=(started - self._ended) // 1000,
            prepare_us=(prepare_done - started) // 1000,
            forward_us=(forward_done - prepare_done) // 1000,
            sample_us=(sample_done - forward_done) // 1000,
            prompt_scores=scores,
            score_us=(time.perf_counter_ns() - sample_done) // 1000,
            embeddings=embeddings,
        )

    def _sample(self, logits: torch.Tensor, rows: Ints) -> _Sampled:
        if not len(rows):
            return _Sampled(np.zeros(0, dtype=np.int64))
        sampled = self._sample_here(logits, rows) if self._comm.rank == 0 else _Sampled(np.zeros(len(rows), np.int64))
        if self._comm.size > 1:
            token_ids = self._comm.broadcast(torch.from_numpy(sampled.token_ids).to(self._device)).cpu().numpy()
            sampled = sampled._replace(token_ids=token_ids)
        return sampled

    def _sample_here(self, logits: torch.Tensor, rows: Ints) -> _Sampled:
        if self._sampler.all_plain(rows):
            return _Sampled(argmax(logits))
        output_index = self._rows.num_tokens[rows] - self._rows.num_prompt[rows]
        batch = self._sampler.batch(rows, output_index)
        choose = self._model.backend.choose_tokens
        if self._grammars is None:
            return _Sampled(*sample(logits, batch, choose=choose))
        token_ids, logprobs = sample(logits, batch, self._grammars.mask(), choose)
        completed, failed = self._grammars.take(rows, token_ids)
        # A row that can't go on keeps running in vain until the scheduler knows.
        return _Sampled(np.maximum(token_ids, 0), logprobs, completed, failed)
