"""The sampler's kernels on the vocabularies of SmolLM2-135M, Llama-3.1-8B and Qwen2.5-1.5B."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels import reference
from kernels.gpu.block_statistics import Workspace
from kernels.gpu.penalties import apply_bitmask, apply_penalties
from kernels.gpu.sampling import argmax, choose_tokens, log_probabilities
from kernels.gpu.verification import verify
from tools.gpu_kernels.case import Case, Launch, Prepared

_VOCABULARY = 128256  # of Llama: what depends on it little is tried with this one
_VOCABULARIES = (49152, _VOCABULARY, 151936)
_ROWS = (1, 64, 256)
_TOP = 20  # log-probabilities
_PENALIZED = 1000  # distinct tokens of prompt and output
_DRAFTS = 4
_WORD_END = (1 << 31) - 1  # of random words of a mask

# Of the largest id: where a sum is rounded otherwise than in float64, the next token that may be drawn is another one
# that is close by.
_IDS_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class _Filters:
    """Of all rows of a case."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    flat: bool = False


_EVERYWHERE = (_Filters("top-p 0.9", top_p=0.9), _Filters("top-k 50", top_k=50))
_OF_ONE_VOCABULARY = (
    *_EVERYWHERE,
    _Filters("temperature"),
    _Filters("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    _Filters("top-p 0.9 of a flat distribution", top_p=0.9, flat=True),
)


def cases() -> list[Case]:
    found: list[Case] = []
    for vocab, rows in product(_VOCABULARIES, _ROWS):
        shape, size = {"rows": rows, "vocab": vocab}, f"{rows} x {vocab}"
        logits_read = 4.0 * rows * vocab
        found.append(
            Case(
                kernel="argmax",
                name=size,
                shape=shape,
                prepare=partial(_argmax, rows, vocab),
                num_bytes=logits_read,
                rival="torch.argmax",
                candidates=_candidates_of_best(),
            )
        )
        found.extend(
            Case(
                kernel="choose_tokens",
                name=f"{size}, {filters.name}",
                shape=shape,
                prepare=partial(_choice, rows, vocab, filters),
                num_bytes=logits_read,
                rival="torch.sort",
                tolerance=_IDS_TOLERANCE,
                candidates=_candidates_of_choice(),
            )
            for filters in (_OF_ONE_VOCABULARY if vocab == _VOCABULARY else _EVERYWHERE)
        )
        found.append(
            Case(
                kernel="log_probabilities",
                name=f"{size}, {_TOP} best",
                shape=shape,
                prepare=partial(_log_probabilities, rows, vocab),
                num_bytes=logits_read,
                rival="torch.log_softmax and topk",
                candidates=_candidates_of_best(),
            )
        )
        found.append(
            Case(
                kernel="apply_bitmask",
                name=size,
                shape=shape,
                prepare=partial(_bitmask, rows, vocab),
                # Half of the logits are read, the other half is written.
                num_bytes=logits_read + rows * vocab / 8,
                rival="torch.Tensor.masked_fill_",
                candidates=_with_warps("WORDS", (16, 32, 64, 128, 256)),
            )
        )
    for rows in _ROWS:
        found.append(
            Case(
                kernel="edit_logits",
                name=f"{rows} x {_VOCABULARY}, {_PENALIZED} penalties a row",
                shape={"entries": rows * _PENALIZED},
                prepare=partial(_penalties, rows, _VOCABULARY),
                # Two int32 and four float32 of each entry, and its logit read and written.
                num_bytes=rows * _PENALIZED * 32.0,
                rival="torch, indexed",
                candidates=_with_warps("ENTRIES", (128, 256, 512, 1024)),
            )
        )
        found.append(
            Case(
                kernel="verify",
                name=f"{rows} sequences, {_DRAFTS} drafts",
                shape={"sequences": rows},
                prepare=partial(_verification, rows),
                num_bytes=rows * 4.0 * (2 * _DRAFTS + 4),
                candidates=_with_warps("COUNTS", (64, 128, 256), DRAFTS=32),
            )
        )
    return found


def _with_warps(name: str, sizes: tuple[int, ...], **more: int) -> tuple[Mapping[str, Any], ...]:
    return tuple({name: size, **more, "num_warps": warps} for size, warps in product(sizes, (1, 2, 4, 8)))


_STATISTICS = _with_warps("BLOCKS", (4, 8, 16, 32, 64))


def _candidates_of_best() -> tuple[Mapping[str, Any], ...]:
    return tuple({"statistics": first, "best": {"num_warps": warps}} for first, warps in product(_STATISTICS, (4, 8)))


def _candidates_of_choice() -> tuple[Mapping[str, Any], ...]:
    statistics = ({"BLOCKS": 8, "num_warps": 4}, {"BLOCKS": 32, "num_warps": 4}, {"BLOCKS": 32, "num_warps": 8})
    bound = ({"num_warps": 4}, {"num_warps": 8})
    collect = ({"BLOCKS": 8, "num_warps": 4}, {"BLOCKS": 16, "num_warps": 4})
    choose = ({"BLOCKS": 16, "num_warps": 8}, {"BLOCKS": 16, "num_warps": 16}, {"BLOCKS": 32, "num_warps": 16})
    return tuple(
        {"statistics": first, "bound": second, "collect": third, "choose": fourth}
        for first, second, third, fourth in product(statistics, bound, collect, choose)
    )


class _Data:
    """Random tensors of a device; on "meta" they have no contents."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._random = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self._device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float64 in [0, 1)."""
        return torch.rand(shape, generator=self._random, dtype=torch.float64, device=self._device)

    def integers(self, end: int, *shape: int) -> torch.Tensor:
        """int32 below `end`."""
        return torch.randint(end, shape, generator=self._random, dtype=torch.int32, device=self._device)

    def distinct_ids(self, rows: int, vocab: int, count: int) -> torch.Tensor:
        """[rows, count] int32, none twice in a row."""
        first = self.integers(vocab, rows, 1)
        step = vocab // count
        return (first + step * torch.arange(count, dtype=torch.int32, device=self._device)) % vocab

    def logits(self, rows: int, vocab: int, *, flat: bool = False) -> torch.Tensor:
        """[rows, vocab]; not flat: some ids of each row stand out, as they do in those of language models."""
        if flat:
            return self.normal(rows, vocab)
        best = self.distinct_ids(rows, vocab, 48).long()
        return (2.5 * self.normal(rows, vocab)).scatter_add_(1, best, 12 * self.uniform(*best.shape).float())

    def full(self, rows: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=self._device)


def _argmax(rows: int, vocab: int, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    logits = data.logits(rows, vocab)
    space, out = Workspace.allocate(rows, vocab, device), data.full(rows, -1, torch.int32)
    return Prepared(
        launch=lambda: argmax(logits, workspace=space, out=out),
        expected=lambda: logits.double().argmax(-1),
        rival=lambda: torch.argmax(logits, dim=-1),
    )


def _choice(rows: int, vocab: int, filters: _Filters, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    logits, uniforms = data.logits(rows, vocab, flat=filters.flat), data.uniform(rows)
    temperature = data.full(rows, 0.8, torch.float32)
    top_k = data.full(rows, filters.top_k, torch.int32)
    top_p = data.full(rows, filters.top_p, torch.float64)
    min_p = data.full(rows, 0.0, torch.float32)
    space, out = Workspace.allocate(rows, vocab, device), data.full(rows, -1, torch.int32)

    def expected() -> torch.Tensor:
        settings = float(temperature[0]), filters.top_k, filters.top_p
        weights = (reference.sampling_weights(row.double(), *settings) for row in logits)
        return torch.tensor([reference.draw(row, u) for row, u in zip(weights, uniforms.tolist(), strict=True)])

    def by_sorting() -> torch.Tensor:
        best, ids = (logits / temperature[:, None]).sort(dim=-1, descending=True)
        weights = best.softmax(dim=-1)
        dropped = weights.cumsum(dim=-1) - weights >= top_p[:, None]
        if filters.top_k:
            dropped[:, filters.top_k :] = True
        drawn = torch.multinomial(weights.masked_fill_(dropped, 0.0), 1)
        return ids.gather(1, drawn)[:, 0]

    return Prepared(
        launch=lambda: choose_tokens(logits, temperature, top_k, top_p, min_p, uniforms, workspace=space, out=out),
        expected=lambda: expected().to(device),
        rival=by_sorting,
    )


def _log_probabilities(rows: int, vocab: int, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    logits, token_ids = data.logits(rows, vocab), data.integers(vocab, rows)
    space = Workspace.allocate(rows, vocab, device)

    def by_torch() -> tuple[torch.Tensor, ...]:
        table = torch.log_softmax(logits, dim=-1)
        of_tokens = table.gather(1, token_ids.long()[:, None])
        best = table.topk(_TOP, dim=-1)
        return of_tokens[:, 0], best.indices, best.values, (table > of_tokens).sum(-1) + 1

    def expected() -> tuple[torch.Tensor, ...]:
        found = []
        for row, token_id in zip(logits, token_ids.tolist(), strict=True):  # in float64, all take twice the memory
            table = torch.log_softmax(row.double(), dim=-1)
            best = table.topk(_TOP)
            found.append((table[token_id], best.indices, best.values, (table > table[token_id]).sum() + 1))
        return tuple(torch.stack(column) for column in zip(*found, strict=True))

    return Prepared(
        launch=lambda: log_probabilities(logits, token_ids, top=_TOP, workspace=space),
        expected=expected,
        rival=by_torch,
    )


def _in_place(start: Callable[[], object], written: Callable[[], torch.Tensor]) -> Launch:
    """`start` changes what it is given: what it wrote is looked at once, after the first call."""
    first: list[torch.Tensor] = []

    def launch() -> torch.Tensor:
        start()
        if not first:
            first.append(written())
        return first[0]

    return launch


def _bitmask(rows: int, vocab: int, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    logits = data.logits(rows, vocab)
    bitmask = data.integers(_WORD_END, rows, -(-vocab // 32))
    index = torch.arange(rows, dtype=torch.int32, device=device)
    empty = data.full(rows, 0, torch.int32)
    forbidden: list[torch.Tensor] = []

    def by_torch(values: torch.Tensor) -> torch.Tensor:
        if not forbidden:
            bits = torch.arange(32, dtype=torch.int32, device=device)
            forbidden.append((((bitmask[:, :, None] >> bits) & 1) == 0).flatten(1)[:, :vocab])
        return values.masked_fill_(forbidden[0], -torch.inf)

    before = logits.clone()
    return Prepared(
        # Compared are numbers, not infinities.
        launch=_in_place(lambda: apply_bitmask(logits, bitmask, index, empty=empty), logits.exp),
        expected=lambda: by_torch(before.double()).exp(),
        rival=lambda: by_torch(logits),
    )


def _penalties(rows: int, vocab: int, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    logits = data.logits(rows, vocab)
    ids = data.distinct_ids(rows, vocab, _PENALIZED).flatten()
    row = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(_PENALIZED)
    count = rows * _PENALIZED
    counts = data.integers(4, count).float()
    repetition, presence, frequency = (data.full(count, value, torch.float32) for value in (1.1, 0.5, 0.25))
    where = row.long(), ids.long()

    def by_torch() -> torch.Tensor:
        x = logits[where]
        x = torch.where(x < 0, x * repetition, x / repetition) - frequency * counts - presence * (counts > 0)
        logits[where] = x
        return x

    before = logits[where].double()
    return Prepared(
        launch=_in_place(
            lambda: apply_penalties(logits, row, ids, counts, repetition, presence, frequency), lambda: logits[where]
        ),
        expected=lambda: torch.where(before < 0, before * 1.1, before / 1.1) - 0.25 * counts - 0.5 * (counts > 0),
        rival=by_torch,
    )


def _verification(sequences: int, device: torch.device, seed: int) -> Prepared:
    data = _Data(device, seed)
    num_drafts = data.full(sequences, _DRAFTS, torch.int32)
    targets, drafts = data.integers(2, sequences, _DRAFTS + 1), data.integers(2, sequences, _DRAFTS)
    accepted, next_token = data.full(sequences, -1, torch.int32), data.full(sequences, -1, torch.int32)

    def expected() -> tuple[torch.Tensor, ...]:
        kept = (targets[:, :-1] == drafts).cumprod(-1).sum(-1)
        return kept, targets.gather(1, kept[:, None])[:, 0]

    return Prepared(
        launch=lambda: verify(
            targets.flatten(), drafts.flatten(), num_drafts, accepted=accepted, next_token=next_token
        ),
        expected=expected,
    )
