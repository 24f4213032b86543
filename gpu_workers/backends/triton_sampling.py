"""Sampling on the device: the host sends what the step's rows ask for, and gets ids back, and waits for neither.

The order of operations is that of `gpu_workers.sampling`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.backends.triton_inputs import GpuBatch
from gpu_workers.backends.triton_transfer import Array, Arriving, Download, Upload
from gpu_workers.drawn import Drawn, Logprobs, Tokens
from gpu_workers.noise import uniform
from gpu_workers.sampling import GREEDY_BELOW, NOT_NUMBERS, PackedMask, SamplingBatch
from ipc.engine_messages import RawLogprobs
from kernels.gpu.penalties import apply_bias, apply_bitmask, apply_penalties, ban
from kernels.gpu.sampling import argmax, choose_tokens, log_probabilities

_PENALTIES = ("counts", "repetition", "presence", "frequency")

_Ints = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class _Asked:
    """The rows of a step that want log-probabilities, and how many alternatives each."""

    rows: _Ints  # [A]
    wanted: _Ints  # [A]

    def logprobs(self, num_rows: int, arrays: Iterator[Array]) -> Logprobs:
        chosen, top_ids, top_values = next(arrays), next(arrays), next(arrays)
        found: list[RawLogprobs | None] = [None] * num_rows
        for index, (row, wanted) in enumerate(zip(self.rows.tolist(), self.wanted.tolist(), strict=True)):
            found[row] = RawLogprobs(
                chosen=float(chosen[index]),
                top_ids=top_ids[index, :wanted].astype("<i4").tobytes(),
                top_values=top_values[index, :wanted].astype("<f4").tobytes(),
            )
        return tuple(found)


class DeviceDrawn(Drawn):
    """The ids of S rows, and what else was asked for, on their way to the host."""

    def __init__(self, arriving: Arriving, asked: _Asked | None = None, masked: _Ints | None = None) -> None:
        self._arriving = arriving
        self._asked = asked
        self._masked = masked

    def ready(self) -> bool:
        return self._arriving.ready()

    def result(self) -> tuple[Tokens, Logprobs]:
        arrays = iter(self._arriving.wait())
        token_ids = next(arrays).astype(np.int64)
        unknown = token_ids < 0
        if self._masked is not None:
            impossible = self._masked[next(arrays) != 0]
            unknown[impossible] = False
            token_ids[impossible] = -1
        if unknown.any():
            raise FloatingPointError(NOT_NUMBERS)
        return token_ids, () if self._asked is None else self._asked.logprobs(len(token_ids), arrays)


class DeviceSampler:
    """Samples from the logits of each step of one runner."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device)
        self._download = Download(device)

    def greedy(self, logits: torch.Tensor, batch: GpuBatch) -> Drawn:
        token_ids = argmax(logits)
        batch.last_tokens.index_copy_(0, batch.sampling_rows, token_ids)
        return DeviceDrawn(self._download.start([token_ids]))

    def draw(self, logits: torch.Tensor, batch: GpuBatch, settings: SamplingBatch, mask: PackedMask | None) -> Drawn:
        """See `Backend.draw`."""
        asked = np.flatnonzero(settings.logprobs >= 0)
        arrays = _columns(settings) | _edits(settings, logits.shape[1])
        if len(asked):
            arrays["asked"] = asked
        if mask is not None:
            arrays |= {"mask": mask.bits, "mask_rows": mask.rows.astype(np.int32)}
        sent = dict(zip(arrays, self._upload.send(list(arrays.values())), strict=True))
        _edit(logits, sent)
        # What a mask forbids still has a log-probability.
        reported = logits.index_select(0, sent["asked"]) if len(asked) else None
        results = []
        if mask is not None:
            results.append(apply_bitmask(logits, sent["mask"], sent["mask_rows"]))
        token_ids = choose_tokens(
            logits, *(sent[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniforms"))
        )
        batch.last_tokens.index_copy_(0, batch.sampling_rows, token_ids)
        if reported is not None:
            most = int(settings.logprobs.max())
            chosen, top_ids, top_values, _ = log_probabilities(
                reported, token_ids.index_select(0, sent["asked"]), top=most
            )
            results += [chosen, top_ids, top_values]
        return DeviceDrawn(
            self._download.start([token_ids, *results]),
            _Asked(asked, settings.logprobs[asked]) if len(asked) else None,
            None if mask is None else mask.rows,
        )


def _columns(settings: SamplingBatch) -> dict[str, Array]:
    """Of each row."""
    return {
        "temperature": np.where(settings.temperature < GREEDY_BELOW, np.float32(0), settings.temperature),
        "top_k": settings.top_k.astype(np.int32),
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "uniforms": uniform(settings.seeds, settings.output_index),
    }


def _edits(settings: SamplingBatch, vocab_size: int) -> dict[str, Array]:
    """Of single logits."""
    arrays: dict[str, Array] = {}
    for name in ("bias", "banned", "penalties"):
        edit = getattr(settings, name)
        if edit is not None:
            arrays |= {f"{name}_rows": edit.rows.astype(np.int32), f"{name}_ids": edit.ids.astype(np.int32)}
    if settings.bias is not None:
        arrays["bias_values"] = settings.bias.values.astype(np.float32)
    if settings.penalties is not None:
        for name in _PENALTIES:
            arrays[name] = getattr(settings.penalties, name).astype(np.float32)
    if settings.allowed:
        allowed = np.zeros((len(settings.allowed), -(-vocab_size // 32) * 32), dtype=np.bool_)
        for flags, ids in zip(allowed, settings.allowed.values(), strict=True):
            flags[ids] = True
        arrays["allowed"] = np.packbits(allowed, axis=1, bitorder="little").view("<i4")
        arrays["allowed_rows"] = np.array(list(settings.allowed), dtype=np.int32)
    return arrays


def _edit(logits: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
    """See `gpu_workers.sampling.edit_logits`."""
    if "bias_rows" in sent:
        apply_bias(logits, sent["bias_rows"], sent["bias_ids"], sent["bias_values"])
    if "allowed" in sent:
        apply_bitmask(logits, sent["allowed"], sent["allowed_rows"])
    if "banned_rows" in sent:
        ban(logits, sent["banned_rows"], sent["banned_ids"])
    if "penalties_rows" in sent:
        apply_penalties(logits, sent["penalties_rows"], sent["penalties_ids"], *(sent[name] for name in _PENALTIES))
