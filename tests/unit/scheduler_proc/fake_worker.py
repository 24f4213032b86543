"""A worker without a model, which checks what a real one relies on.

Its "KV" of a position is a digest of all token ids up to it, so a block that holds anything else than what the block
table promises (a wrong share, a reuse too early, a hole) is noticed at the step that reads it. The "model" is a
function of the tokens so far: whatever scheduling does, a request's tokens must be those of `continuation`.
"""

import hashlib
import struct
from array import array

from ipc.codec import unpack_ints
from ipc.engine_messages import NewRow, PromptScores, StepPlan, StepResult

VOCABULARY = 50


def _digest(previous: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(digest: bytes) -> int:
    """What the "model" samples after a sequence with this digest; id 0 (the end of sequence) now and then."""
    return int.from_bytes(digest, "little") % VOCABULARY


def score(digest: bytes) -> float:
    """The "log-probability" of a sequence's last token, from the sequence's digest."""
    return -float(int.from_bytes(digest[:2], "little"))


def prompt_scores(prompt: list[int]) -> list[float]:
    """What a request must be told of its prompt, computed from scratch."""
    digest = b""
    scores = []
    for token in prompt:
        digest = _digest(digest, token)
        scores.append(score(digest))
    return scores[1:]


def continuation(prompt: list[int], max_tokens: int, stops: frozenset[int], min_tokens: int = 0) -> list[int]:
    """The outputs a request must get, computed alone and from scratch."""
    digest = b""
    for token in prompt:
        digest = _digest(digest, token)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        token = next_token(digest)
        outputs.append(token)
        if token in stops and len(outputs) > min_tokens:
            break
        digest = _digest(digest, token)
    return outputs


class FakeWorker:
    """Executes plans in order against a pool of `num_blocks` blocks and a host pool.

    The copies of a plan may run at any time during its forward: here before it in even steps, after it in odd ones.
    """

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.pool: dict[int, bytes] = {}  # slot -> digest
        self.host: dict[int, bytes] = {}
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.max_seqs = max_seqs
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.scored: dict[int, NewRow] = {}  # rows that want log-probabilities of their prompts
        self.num_scored = 0
        self.next_step = 0
        self.max_tokens_seen = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.next_step
        self.next_step += 1
        for row in unpack_ints(plan.freed_rows):
            del self.tokens[row], self.tables[row]
        for new in plan.new_rows:
            assert new.row not in self.tokens
            assert 0 <= new.row < self.max_seqs
            self.tokens[new.row] = list(unpack_ints(new.token_ids))
            self.tables[new.row] = list(unpack_ints(new.block_ids))
            self.scored.pop(new.row, None)
            if new.sampling.prompt_logprobs >= 0:
                self.scored[new.row] = new
        grown = unpack_ints(plan.new_blocks)
        for row, index, block in zip(grown[::3], grown[1::3], grown[2::3], strict=True):
            assert index == len(self.tables[row])
            self.tables[row].append(block)
        copying = self._check_copies(plan)
        if plan.step % 2 == 0:
            self._copy(plan)
        columns = unpack_ints(plan.scheduled)
        seen: set[int] = set()
        written: set[int] = set()
        sampled = array("i")
        total = 0
        scores = []
        entries = zip(columns[::4], columns[1::4], columns[2::4], columns[3::4], strict=True)
        for index, (row, start, count, sample) in enumerate(entries):
            assert row not in seen
            seen.add(row)
            assert count > 0
            total += count
            assert copying.isdisjoint(self.tables[row][: -(-(start + count) // self.block_size)])
            digest = self._check_prefix(row, start)
            tokens = self.tokens[row]
            for position in range(start, start + count):
                digest = _digest(digest, tokens[position])
                slot = self._slot(row, position)
                assert slot not in written, "two rows write one slot in one step"
                written.add(slot)
                self.pool[slot] = digest
            if row in self.scored:
                scores += self._scores(index, self.scored[row], start, start + count)
            if sample:
                assert start + count == len(tokens), "only the end of the known tokens can be sampled after"
                token = next_token(digest)
                tokens.append(token)
                sampled.append(token)
        if plan.step % 2:
            self._copy(plan)
        self.max_tokens_seen = max(self.max_tokens_seen, total)
        return StepResult(plan.step, sampled.tobytes(), prompt_scores=tuple(scores))

    def _scores(self, index: int, new: NewRow, start: int, end: int) -> list[PromptScores]:
        """Of the tokens after the positions of a chunk, as far as they are the prompt's and not known already."""
        positions = range(max(start, new.num_scored), min(end, new.num_prompt - 1))
        if not positions:
            return []
        self.num_scored += len(positions)
        digests = [self.pool[self._slot(new.row, position)] for position in positions]
        values = [
            score(_digest(digest, self.tokens[new.row][position + 1]))
            for digest, position in zip(digests, positions, strict=True)
        ]
        return [PromptScores(index, positions[0] + 1, struct.pack(f"<{len(values)}f", *values), b"", b"", b"")]

    def _check_copies(self, plan: StepPlan) -> set[int]:
        """The KV blocks that the plan copies; each block, here and on the host, takes part in one copy at most."""
        out, back = unpack_ints(plan.copies_out), unpack_ints(plan.copies_in)
        device, host = [*out[::2], *back[1::2]], [*out[1::2], *back[::2]]
        assert len(set(device)) == len(device)
        assert len(set(host)) == len(host)
        assert all(0 <= block < self.num_blocks for block in device)
        assert all(0 <= block < self.num_host_blocks for block in host)
        return set(device)

    def _copy(self, plan: StepPlan) -> None:
        out, back = unpack_ints(plan.copies_out), unpack_ints(plan.copies_in)
        for block, host in zip(out[::2], out[1::2], strict=True):
            for offset in range(self.block_size):
                self.host[host * self.block_size + offset] = self.pool[block * self.block_size + offset]
        for host, block in zip(back[::2], back[1::2], strict=True):
            for offset in range(self.block_size):
                self.pool[block * self.block_size + offset] = self.host[host * self.block_size + offset]

    def _slot(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size

    def _check_prefix(self, row: int, length: int) -> bytes:
        digest = b""
        for position in range(length):
            digest = _digest(digest, self.tokens[row][position])
            assert self.pool.get(self._slot(row, position)) == digest, (
                f"row {row}: KV of position {position} is not its own"
            )
        return digest
