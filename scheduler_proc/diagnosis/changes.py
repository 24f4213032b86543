"""Changes of one setting that might help, each as the load and the setup that a replay would meet with it.

A change is proposed only where the window has evidence of what it acts on; whether it helps, and whom, the replay says.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from config.bytesize import format_size, parse_size
from config.schema import Config
from ipc.stats_messages import CauseName
from scheduler_proc.cost_model import CostModel, StepShape
from scheduler_proc.diagnosis.launch_check import LaunchCheck
from scheduler_proc.diagnosis.what_if import Load, Setup
from scheduler_proc.diagnosis.workload import Facts

_MARGIN = 1.5  # typical relative errors of the cost model: how far below `--max-itl-ms` the planner aims
_NOTICEABLE = 0.02  # share of the time or of the waiting
_HEADROOM = 1.5  # times the longest request that there was: later ones may be longer
_MUCH_SHORTER = 1.5  # times: requests than the context, for a shorter context to be advised
_WORTH = 1.2  # times as large: a pool that is larger by less is no advice
_MAX_SEQS = 4096
_MAX_STEP_TOKENS = 1 << 20
_MIN_STEP_TOKENS = 16
_MANY_ROWS = 4
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.06, "fp8": 1.06}  # of a KV element, with scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is configured, resolved, and what the launcher found."""

    config: Config
    num_blocks: int
    kv_memory_bytes: int  # of each rank
    cores: int = 0  # that the engine may use; 0: not known
    dequantized: float = 1.0  # times as many bytes as in the file take weights that are dequantized
    launch: LaunchCheck | None = None  # None where no launcher has started it: then all is taken to be possible

    def takes(self, setting: str, value: str) -> bool:
        """Whether it would start with that."""
        return self.launch is None or self.launch.plan_with(setting, value) is not None


@dataclass(frozen=True, slots=True)
class Change:
    """One flag and its new value; `cause` is what it acts on, `trust` what a prediction of its effect deserves."""

    cause: CauseName
    setting: str
    before: str
    after: str
    load: Load
    setup: Setup
    trust: float = 0.9


def setup_of(engine: Engine, cost: CostModel, overhead: float) -> Setup:
    """As the engine runs now. `overhead`: seconds of a step in which the device does nothing."""
    config = engine.config.scheduler
    assert config.max_seqs is not None
    assert config.max_step_tokens is not None
    assert config.prefill_chunk is not None
    return Setup(
        max_seqs=config.max_seqs,
        max_step_tokens=config.max_step_tokens,
        prefill_chunk=config.prefill_chunk,
        num_blocks=engine.num_blocks,
        block_size=config.block_size,
        long_prompt_tokens=config.long_prompt_tokens,
        max_long_prefills=config.max_long_prefills,
        long_step_share=config.long_step_share,
        prefer=config.prefer,
        waits_for_blocks=config.kv_shortage == "wait",
        max_itl=None if config.max_itl_ms is None else _effective(config.max_itl_ms / 1e3, cost),
        cost=cost.coefficients,
        overhead=overhead,
        batch_wait=config.batch_wait_ms / 1e3,
    )


def _effective(max_itl: float, cost: CostModel) -> float:
    return max_itl / (1 + _MARGIN * cost.relative_error)


def growing_cost(cost: tuple[float, ...], facts: Facts) -> tuple[float, ...]:
    """The costs for more requests at once than there have been.

    Where batches were all of one size, nobody has seen what a further request costs; then it is taken to be what a
    prompt token does, which is the most that it can where products are the limit.
    """
    base, token, row, *others = cost
    rows = facts.steps.decode_rows / max(1, facts.steps.steps)
    further = max(row, token)
    return (max(0.0, base - (further - row) * rows), token, further, *others)


class Proposals:
    """All changes that the facts give a reason for, and with which the engine would start."""

    def __init__(self, engine: Engine, facts: Facts, setup: Setup, cost: CostModel) -> None:
        self._engine = engine
        self._facts = facts
        self._setup = setup
        self._cost = cost
        self._load = facts.load
        self._growing = growing_cost(setup.cost, facts)

    def __iter__(self) -> Iterator[Change]:
        return (change for change in self._with_reason() if self._engine.takes(change.setting, change.after))

    def _with_reason(self) -> Iterator[Change]:
        yield from self._rows()
        yield from self._step_tokens()
        yield from self._itl_limit()
        yield from self._preference()
        yield from self._long_prompts()
        yield from self._blocks()
        yield from self._reservations()
        yield from self._prefixes()
        yield from self._device()

    def _change(
        self, cause: CauseName, setting: str, before: object, after: object, trust: float = 0.9, **setup: object
    ) -> Change:
        changed = replace(self._setup, **setup)  # type: ignore[arg-type]  # names of its fields, checked by it
        return Change(cause, setting, str(before), str(after), self._load, changed, trust)

    def _limited_by(self, *names: str) -> bool:
        """Whether these kept requests from starting, or tokens out of steps, for a share of the time worth a look."""
        steps = self._facts.steps
        seconds = math.fsum(steps.limits.get(name, 0.0) for name in names)
        waits = math.fsum(self._facts.limits.get(name, 0.0) for name in names)
        return seconds > _NOTICEABLE * self._facts.seconds or waits > _NOTICEABLE

    # --- the scheduler's settings ---

    def _rows(self) -> Iterator[Change]:
        seqs = self._setup.max_seqs
        most = min(_MAX_SEQS, self._setup.max_step_tokens)
        if self._limited_by("max_seqs"):
            wanted = max(self._load.clients, math.ceil(self._facts.running + self._facts.waiting))
            for after in sorted({min(most, value) for value in (2 * seqs, 4 * seqs, wanted)}):
                if after > seqs:
                    yield self._change("queue", "--max-seqs", seqs, after, max_seqs=after, cost=self._growing)
        rows = min(seqs, math.ceil(self._facts.steps.decode_rows / max(1, self._facts.steps.steps)))
        for after in (rows // 2, rows // 4):
            if after >= 1 and rows >= _MANY_ROWS:
                yield self._change("decode", "--max-seqs", seqs, after, max_seqs=after)

    def _step_tokens(self) -> Iterator[Change]:
        tokens, chunk = self._setup.max_step_tokens, self._setup.prefill_chunk
        if self._limited_by("max_step_tokens", "prefill_chunk", "long_prompts"):
            if chunk < tokens:
                yield self._change("prefill", "--prefill-chunk", chunk, tokens, prefill_chunk=tokens)
            for factor in (2, 4):
                yield from self._with_step_tokens(min(_MAX_STEP_TOKENS, factor * tokens))
        if self._interferes:
            for divisor in (2, 4, 8):
                yield from self._with_step_tokens(max(_MIN_STEP_TOKENS, self._setup.max_seqs, tokens // divisor))

    def _with_step_tokens(self, after: int) -> Iterator[Change]:
        """Nothing where that is what it is."""
        tokens, chunk = self._setup.max_step_tokens, self._setup.prefill_chunk
        if after != tokens:
            chunk = after if chunk == tokens else min(chunk, after)
            yield self._change(
                "prefill", "--max-step-tokens", tokens, after, max_step_tokens=after, prefill_chunk=chunk
            )

    @property
    def _interferes(self) -> bool:
        """Whether prompts are computed in steps that streams wait for."""
        steps = self._facts.steps
        return steps.prefill_steps > 0 and steps.decode_rows > 0

    @property
    def decode_seconds(self) -> float:
        """Predicted time of a mean step without any prompt."""
        steps = self._facts.steps
        count = max(1, steps.steps)
        shape = StepShape(decode_rows=round(steps.decode_rows / count), context_tokens=steps.context_tokens // count)
        return self._cost.predict(shape) + self._facts.overhead

    def _itl_limit(self) -> Iterator[Change]:
        limit = self._engine.config.scheduler.max_itl_ms
        if limit is None:
            if self._interferes and self._setup.prefer != "prefill":
                for factor in (2.0, 4.0):
                    after = max(1, math.ceil(1e3 * factor * self.decode_seconds))
                    effective = _effective(after / 1e3, self._cost)
                    yield self._change("prefill", "--max-itl-ms", "none", after, max_itl=effective)
        elif self._limited_by("max_itl_ms"):
            for wider in (2 * limit, 4 * limit, 8 * limit):
                effective = _effective(wider / 1e3, self._cost)
                yield self._change(
                    "queue", "--max-itl-ms", f"{limit:g}", f"{wider:g}", max_itl=effective, cost=self._growing
                )

    def _preference(self) -> Iterator[Change]:
        prefer = self._setup.prefer
        if prefer != "mixed" and self._limited_by("prefer"):
            yield self._change("queue", "--prefer", prefer, "mixed", prefer="mixed")
        if prefer != "decode" and self._interferes:
            yield self._change("prefill", "--prefer", prefer, "decode", prefer="decode")
        if prefer != "prefill" and self._interferes:
            # After "mixed", where that was an answer too: the smaller change is taken of two that do as much.
            cause: CauseName = "queue" if prefer == "decode" else "prefill"
            yield self._change(cause, "--prefer", prefer, "prefill", prefer="prefill")
        wait = self._engine.config.scheduler.batch_wait_ms
        if wait and self._facts.starved > _NOTICEABLE:  # no step says so: there is none while a batch fills
            yield self._change("queue", "--batch-wait-ms", f"{wait:g}", "0", batch_wait=0.0)

    def _long_prompts(self) -> Iterator[Change]:
        setup = self._setup
        prompts = sorted(job.prompt - job.cached for job in self._load.jobs if job.counts)
        if not prompts:
            return
        typical, longest = prompts[len(prompts) // 2], prompts[-1]
        if longest > 4 * max(typical, setup.block_size) and longest <= setup.long_prompt_tokens:
            after = max(64, 2 * typical)
            if after < longest:
                yield self._change(
                    "prefill", "--long-prompt-tokens", setup.long_prompt_tokens, after, long_prompt_tokens=after
                )
        if longest > setup.long_prompt_tokens:
            if self._limited_by("long_prompts"):
                after = 4 * setup.max_long_prefills
                yield self._change(
                    "queue", "--max-long-prefills", setup.max_long_prefills, after, max_long_prefills=after
                )
            for share in (0.25, 0.1):
                if share < setup.long_step_share and typical <= setup.long_prompt_tokens:
                    yield self._change(
                        "prefill", "--long-step-share", f"{setup.long_step_share:g}", share, long_step_share=share
                    )

    # --- memory ---

    def _blocks(self) -> Iterator[Change]:
        short = self._limited_by("kv_blocks") or self._facts.totals.preemptions > 0
        if not short:
            return
        memory, setup, launch = self._engine.kv_memory_bytes, self._setup, self._engine.launch
        most = launch.most_kv_bytes if launch else math.inf
        for after, size in _sizes((2 * memory, 4 * memory), most):
            if after > _WORTH * memory:
                blocks = int(setup.num_blocks * after / memory)
                yield self._change(
                    "kv_memory", "--kv-memory", _size(memory), size, num_blocks=blocks, cost=self._growing
                )
        dtype = self._engine.config.model.kv_dtype
        ratio = _BYTES.get(dtype, 0.0) / _BYTES["int8"]
        if ratio > 1.5:
            # On a CPU half the bytes are not half the time: each is multiplied by its scale.
            faster = ratio if self._engine.config.worker.device == "cuda" else 1.0
            base, token, row, context, pair = self._growing
            # A pool that is as large as all sequences need shrinks with them.
            plan = launch.plan_with("--kv-dtype", "int8") if launch else None
            blocks = plan.num_blocks if plan else int(ratio * setup.num_blocks)
            yield self._change(
                "kv_memory",
                "--kv-dtype",
                dtype,
                "int8",
                0.6,
                num_blocks=blocks,
                cost=(base, token, row, context / faster, pair),
            )
        if setup.waits_for_blocks:
            yield self._change(
                "kv_memory", "--kv-shortage", "wait", "recompute", waits_for_blocks=False, cost=self._growing
            )

    def _reservations(self) -> Iterator[Change]:
        """Blocks that are kept for outputs which do not come: requests without max_tokens keep them for all contexts.

        Nobody who asks for a number of tokens is to be refused.
        """
        setup, longest = self._setup, self._engine.config.model.max_model_len
        if not setup.waits_for_blocks or longest is None or not self._limited_by("kv_blocks"):
            return
        asked = [most for _, most in self._facts.spans if most < longest]
        unasked = [used for used, most in self._facts.spans if most >= longest]
        if not unasked:
            return
        needed = max([math.ceil(_HEADROOM * max(unasked)), *asked])
        after = -(-needed // setup.block_size) * setup.block_size
        if _MUCH_SHORTER * after <= longest:
            jobs = [job._replace(most=max(job.outputs, min(job.most, after - job.prompt))) for job in self._load.jobs]
            load = self._load._replace(jobs=jobs)
            changed = replace(setup, cost=self._growing)
            yield Change("kv_memory", "--max-model-len", str(longest), str(after), load, changed, 0.6)

    def _prefixes(self) -> Iterator[Change]:
        """What is computed again although it has been before."""
        facts, config = self._facts, self._engine.config
        missed = facts.repeated - facts.cached
        if missed < _NOTICEABLE * max(1.0, facts.prompt):
            return
        hit = [
            job._replace(cached=max(job.cached, job.repeated), shared=max(job.shared, job.repeated))
            if job.counts
            else job
            for job in self._load.jobs
        ]
        load = self._load._replace(jobs=hit)
        if not config.scheduler.prefix_cache:
            yield Change("prefill", "--prefix-cache", "off", "on", load, self._setup, 0.8)
        elif facts.totals.evicted_blocks and config.worker.host_kv_memory in (None, "0"):
            memory, launch = self._engine.kv_memory_bytes, self._engine.launch
            [(size, after)] = _sizes((4 * memory,), launch.most_host_kv_bytes if launch else math.inf)
            if size >= memory:  # a smaller one would hold little that the pool does not
                yield Change("kv_memory", "--host-kv-memory", "none", after, load, self._setup, 0.4)

    # --- the device ---

    def _device(self) -> Iterator[Change]:
        config, setup = self._engine.config, self._setup
        threads = config.worker.threads
        if config.worker.device == "cpu" and threads and threads < self._engine.cores // config.worker.tp:
            after = self._engine.cores // config.worker.tp
            faster = tuple(cost * threads / after for cost in setup.cost)
            yield self._change("decode", "--threads", threads, after, 0.5, cost=faster)
        if config.model.quantization == "none" and self._engine.dequantized > 1:
            # Reading the weights is most of what a step costs whatever is in it.
            base, *others = setup.cost
            cost = (base / self._engine.dequantized, *others)
            yield self._change("decode", "--quantization", "none", "auto", 0.4, cost=cost)


def _sizes(wanted: Iterable[int], most: float) -> list[tuple[int, str]]:
    """As they are written on the command line, and the bytes that these texts mean, none more than `most`.

    Without what is the same. Three digits may mean more than the size that they were made of.
    """
    found = [(parse_size(text), text) for text in map(_size, wanted)]
    if math.isfinite(most):
        whole = int(most) >> 20  # rounded down: a byte too many does not fit
        found = [(size, text) if size <= most else (whole << 20, f"{whole}MiB") for size, text in found]
    return list(dict.fromkeys(found))


def _size(number: int) -> str:
    return format_size(number).replace(" ", "")
