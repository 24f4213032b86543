"""What each request's `ChoiceTimings` must say, found out from the plans and outputs alone."""

from collections import Counter, defaultdict

from ipc.codec import unpack_ints
from ipc.engine_messages import RowOutput, StepPlan
from ipc.messages import ChoiceTimings
from ipc.timing_columns import chunks_of

Chunk = tuple[float, float, int]  # planned at, answered at, tokens


class Timelines:
    """Sees what passes between a core and its worker. A request's `SamplingSpec.seed` must be its id."""

    def __init__(self, *, measured: bool = True) -> None:
        """`measured`: False where none may be told."""
        self._measured = measured
        self.told: dict[int, list[ChoiceTimings]] = defaultdict(list)
        self._queued: dict[int, float] = {}
        self._first_scheduled: dict[int, float] = {}
        self._first_token: dict[int, float] = {}
        self._starts: Counter[int] = Counter()  # how often it got a row
        self._chunks: dict[int, list[Chunk]] = defaultdict(list)
        self._outputs: Counter[int] = Counter()
        self._from_chunks: Counter[int] = Counter()  # of the outputs: those that the end of a prefill gave
        self._rows: dict[int, int] = {}
        self._prefilling: set[int] = set()  # rows
        self._plans: dict[int, tuple[float, list[tuple[int, int, int]]]] = {}  # chunks of each step in flight
        self._sampled_chunks: set[int] = set()  # requests to which the step at hand can give the first token

    def arrived(self, time: float, request_id: int) -> None:
        self._queued[request_id] = time

    def planned(self, time: float, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows[new.row] = new.sampling.seed
            self._starts[new.sampling.seed] += 1
            self._prefilling.add(new.row)
        columns = unpack_ints(plan.scheduled)
        chunks = []
        for row, count, sample in zip(columns[::4], columns[2::4], columns[3::4], strict=True):
            if row in self._prefilling:
                chunks.append((self._rows[row], count, sample))
                self._first_scheduled.setdefault(self._rows[row], time)
                if sample:
                    self._prefilling.remove(row)
        self._plans[plan.step] = time, chunks

    def answered(self, time: float, step: int) -> None:
        """To be called before what the core makes of it."""
        planned, chunks = self._plans.pop(step)
        for request_id, count, _ in chunks:
            self._chunks[request_id].append((planned, time, count))
        self._sampled_chunks = {request_id for request_id, _, sample in chunks if sample}

    def token(self, time: float, request_id: int) -> None:
        self._first_token.setdefault(request_id, time)
        self._outputs[request_id] += 1
        self._from_chunks[request_id] += request_id in self._sampled_chunks

    def check(self, time: float, row: RowOutput, num_prompt: int) -> None:
        """What a row tells, after its tokens have been shown to `token`."""
        timings = row.timings
        due = row.finish is not None or not (row.token_ids or row.prompt_scores)
        assert (timings is not None) == (due and self._measured)
        if timings is None:
            return
        name = row.request_id
        self.told[name].append(timings)
        chunks = self._chunks[name]
        starts, steps = self._starts[name], len(chunks) + self._outputs[name] - self._from_chunks[name]
        assert timings.queued == self._queued[name]
        assert timings.first_scheduled == self._first_scheduled[name]
        assert timings.first_token == self._first_token.get(name, time)
        assert timings.last_token == (0.0 if row.finish is None else time)
        assert (timings.steps, timings.preemptions) == (steps, starts - 1)
        got = chunks_of(timings)
        if len(chunks) <= 64:
            assert got == chunks
        else:
            assert got[:63] == chunks[:63]
            assert got[63] == (chunks[63][0], chunks[-1][1], sum(count for _, _, count in chunks[63:]))
        # After a preemption it is computed again, or found in what others have computed meanwhile.
        assert starts > 1 or sum(count for _, _, count in got) == num_prompt - row.cached_tokens
