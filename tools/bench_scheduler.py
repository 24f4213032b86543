"""What the scheduler's own work costs: prefix matching, insertion, eviction, and planning and booking a step."""

import gc
import os
import platform
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import thread_time_ns as clock

from config.schema import SchedulerConfig
from ipc.codec import Decoder, encode, pack_ints, unpack_ints
from ipc.engine_messages import FromWorker, SamplingSpec, StepPlan, StepResult, Submit
from scheduler_proc.core import SchedulerCore
from scheduler_proc.events import Arrived, Command, EngineReady, SendOutputs, SendPlan, StepDone
from scheduler_proc.eviction import make_eviction
from scheduler_proc.radix_tree import Node, RadixTree
from tools.arguments import counts, tool_parser

_EPILOG = """\
Nothing is computed: the device is a function that answers every plan at once with made-up tokens.

tree   match and peek: one prompt of --context tokens, cached in full, in a tree of --blocks blocks, at random among all
       cached prompts. Three shapes of tree:
         turns  prompts share a system prompt, a quarter of them, and differ in the rest
         chunks the same, computed 512 tokens at a time, a node each
         blocks the worst: a node for each block of the matched path, each with another child beside it
       insert, evict, demote: per block, in the same trees; evict 1 gives up one block a call
step   --running requests with contexts of --context tokens decode, two steps in flight: microseconds a step to take
       the result of one (tokens to requests, outputs to tokenizers) and to plan the next; messages is encoding plan and
       outputs and decoding the result. In every step one request in 16 gets a new block.

All times are CPU time of the thread: on an idle machine what a clock on the wall says, and on a busy one without the
waiting. Caches and clock rate still depend on the neighbours: look at the load average that is printed.

  python -m tools.bench_scheduler                          all of it, about half a minute
  python -m tools.bench_scheduler --only tree --blocks 10000
  python -m tools.bench_scheduler --only step --running 256 --steps 1000
"""
_VOCABULARY = 1 << 16
_PEER = b"tokenizer"
_SHAPES = ("turns", "chunks", "blocks")
_CHUNK_TOKENS = 512
_FAMILY = 10  # prompts with the same system prompt
_CHANGED_BLOCKS = 20_000  # how many are inserted, evicted or demoted for one number
_MAX_STEP_TOKENS = 1 << 20  # as the others here, a bound that does not matter: prompts are not what is measured


@dataclass(slots=True)
class Samples:
    """Times of single calls, in microseconds."""

    values: list[float] = field(default_factory=list)

    def add(self, nanoseconds: int) -> None:
        self.values.append(nanoseconds / 1e3)

    def percentile(self, percent: float) -> float:
        ranked = sorted(self.values)
        return ranked[min(int(percent / 100 * len(ranked)), len(ranked) - 1)]

    def row(self) -> list[str]:
        return [f"{self.percentile(percent):.1f}" for percent in (50, 99, 100)]


def random_tokens(rng: random.Random, count: int) -> bytes:
    """`count` token ids, int32."""
    return array("i", array("H", rng.randbytes(2 * count))).tobytes()


# --- the tree ---------------------------------------------------------------------------------------------------------


class Ids:
    """Hands out block ids, each once."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> list[int]:
        first = self.next
        self.next += count
        return list(range(first, self.next))


def prompts(rng: random.Random, context: int) -> Iterator[bytes]:
    """Prompts of `context` tokens, families of which share their first quarter."""
    shared = context // 4
    while True:
        system = random_tokens(rng, shared)
        for _ in range(_FAMILY):
            yield system + random_tokens(rng, context - shared)


def insert_prompt(tree: RadixTree, ids: Ids, prompt: bytes, shape: str) -> None:
    """Cache all whole blocks of a prompt as `shape` has it; block ids the tree did not take are lost."""
    block_bytes = tree.block_size * 4
    step = {"turns": len(prompt), "chunks": _CHUNK_TOKENS * 4, "blocks": block_bytes}[shape]
    node: Node | None = None
    for start in range(0, len(prompt), max(block_bytes, step // block_bytes * block_bytes)):
        part = prompt[start : start + step]
        below = node
        node = tree.insert(part, ids.take(len(part) // block_bytes), after=below).node
        if shape == "blocks":
            other = bytes(reversed(part))
            tree.insert(other, ids.take(1), after=below)


def build_tree(shape: str, num_blocks: int, block_size: int, context: int) -> tuple[RadixTree, list[bytes], Ids]:
    """A tree of at least `num_blocks` blocks, and the prompts in it."""
    tree, ids = RadixTree(block_size, make_eviction("lru")), Ids()
    cached: list[bytes] = []
    for prompt in prompts(random.Random(1), context):
        if tree.num_blocks >= num_blocks:
            break
        insert_prompt(tree, ids, prompt, shape)
        cached.append(prompt)
    return tree, cached, ids


def time_lookups(tree: RadixTree, cached: list[bytes], repeats: int) -> tuple[Samples, Samples]:
    """Times of `match` and of `peek`, one whole prompt each."""
    rng = random.Random(2)
    match, peek = Samples(), Samples()
    for prompt in rng.choices(cached, k=repeats):
        start = clock()
        found = tree.match(prompt)
        match.add(clock() - start)
        if len(found.blocks) != len(prompt) // 4 // tree.block_size:
            raise RuntimeError(f"a cached prompt was matched only for {len(found.blocks)} blocks")
    for prompt in rng.choices(cached, k=repeats):
        start = clock()
        tree.peek(prompt)
        peek.add(clock() - start)
    return match, peek


def time_changes(tree: RadixTree, ids: Ids, shape: str, context: int, count: int) -> dict[str, float]:
    """Nanoseconds a block of inserting prompts, evicting at once, evicting one by one, and demoting `count` blocks."""
    new = prompts(random.Random(3), context)
    before = tree.num_blocks

    def insert() -> int:
        while tree.num_blocks < before + count:
            insert_prompt(tree, ids, next(new), shape)
        return tree.num_blocks - before

    actions: dict[str, Callable[[], int]] = {
        "insert": insert,
        "evict": lambda: len(tree.evict(count)[0]),
        "evict 1": lambda: sum(len(tree.evict(1)[0]) for _ in range(count)),
        "demote": lambda: len(tree.demote(range(count))),
    }
    costs: dict[str, float] = {}
    for name, action in actions.items():
        start = clock()
        blocks = action()
        costs[name] = (clock() - start) / max(1, blocks)
    return costs


def settle() -> None:
    """What lives now lives on: as in a server, later collections are not to walk it again."""
    gc.collect()
    gc.freeze()


def bench_tree(num_blocks: int, block_size: int, context: int, repeats: int) -> Iterator[list[str]]:
    """A table row for each shape."""
    for shape in _SHAPES:
        print(f"tree: {num_blocks} blocks as {shape} ...", file=sys.stderr)
        tree, cached, ids = build_tree(shape, num_blocks, block_size, context)
        nodes = sum(1 for _ in tree.nodes())
        settle()
        match, peek = time_lookups(tree, cached, repeats)
        costs = time_changes(tree, ids, shape, context, min(_CHANGED_BLOCKS, num_blocks // 4))
        gc.unfreeze()
        yield [shape, f"{nodes}", *match.row(), *peek.row()[:2], *(f"{cost:.0f}" for cost in costs.values())]


# --- the step ---------------------------------------------------------------------------------------------------------


class TimedCore(SchedulerCore):
    """Notes how much of an event was planning."""

    planning_ns = 0

    def _plan(self, now: float) -> StepPlan | None:
        start = clock()
        plan = super()._plan(now)
        self.planning_ns += clock() - start
        return plan


@dataclass(slots=True)
class StepCosts:
    """Of single steps: the result taken in, the next plan made, their messages encoded and decoded."""

    take: Samples = field(default_factory=Samples)
    plan: Samples = field(default_factory=Samples)
    total: Samples = field(default_factory=Samples)
    messages: Samples = field(default_factory=Samples)


class StepBench:
    """A core with `running` requests, and a device that answers at once."""

    def __init__(self, running: int, context: int, steps: int, block_size: int) -> None:
        config = SchedulerConfig(
            max_seqs=running,
            max_step_tokens=_MAX_STEP_TOKENS,
            prefill_chunk=_MAX_STEP_TOKENS,
            block_size=block_size,
            max_queue_requests=running,
            max_queue_tokens=1 << 32,
            long_prompt_tokens=1 << 24,
        )
        prefill_steps = -(-running * context // _MAX_STEP_TOKENS)
        longest = context + steps + prefill_steps + 64  # nobody ends before all is measured
        self.core = TimedCore(
            config,
            num_blocks=running * (longest // block_size + 2),
            max_model_len=longest,
            vocab_size=_VOCABULARY,
        )
        self._decode_result: Decoder[FromWorker] = Decoder(FromWorker)
        self._plans: deque[StepPlan] = deque()
        self._time = 0.0
        self._running = running
        rng = random.Random(4)
        self._carry_out(self.core.handle(EngineReady(0.0)))
        for number in range(running):
            prompt = random_tokens(rng, context - number % block_size)
            submit = Submit(number, prompt, longest - context, 0, b"", SamplingSpec())
            self._carry_out(self.core.handle(Arrived(self._time, _PEER, submit)))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, SendPlan):
                self._plans.append(command.plan)
            elif isinstance(command, SendOutputs) and command.outputs.rows:
                raise RuntimeError(f"a request ended: {command.outputs.rows[0]}")

    def _answer(self) -> StepDone:
        plan = self._plans.popleft()
        sampled = sum(unpack_ints(plan.scheduled)[3::4])
        self._time += 0.02
        tokens = pack_ints([100 + plan.step % 100] * sampled)
        return StepDone(self._time, StepResult(plan.step, tokens, prepare_us=10, forward_us=19980))

    def prefill(self) -> None:
        """Until every request decodes in both steps in flight."""
        while any(len(plan.scheduled) != self._running * 16 or plan.new_rows for plan in self._plans):
            self._carry_out(self.core.handle(self._answer()))
            print(f"\r  {self._running} running, step {self._plans[-1].step}", end="", file=sys.stderr)
        print(file=sys.stderr)

    def measure(self, steps: int) -> StepCosts:
        """Times of so many decode steps."""
        costs = StepCosts()
        for _ in range(steps):
            event = self._answer()
            wire = encode(event.result)
            self.core.planning_ns = 0
            start = clock()
            commands = self.core.handle(event)
            total = clock() - start
            costs.total.add(total)
            costs.plan.add(self.core.planning_ns)
            costs.take.add(total - self.core.planning_ns)
            start = clock()
            self._decode_result(wire)
            for command in commands:
                if isinstance(command, SendPlan):
                    encode(command.plan)
                elif isinstance(command, SendOutputs):
                    encode(command.outputs)
            costs.messages.add(clock() - start)
            self._carry_out(commands)
        return costs


def bench_steps(runnings: Iterable[int], context: int, steps: int, block_size: int) -> Iterator[list[str]]:
    """A table row for each number of running requests."""
    for running in runnings:
        print(f"step: {running} requests of {context} tokens ...", file=sys.stderr)
        bench = StepBench(running, context, steps, block_size)
        bench.prefill()
        settle()
        costs = bench.measure(steps)
        gc.unfreeze()
        medians = [f"{samples.percentile(50):.0f}" for samples in (costs.take, costs.plan, costs.messages)]
        yield [f"{running}", *medians, *(f"{costs.total.percentile(percent):.0f}" for percent in (50, 99, 100))]


# --- output -----------------------------------------------------------------------------------------------------------


def print_table(title: str, header: list[str], rows: Iterable[list[str]]) -> None:
    """Columns as wide as they need to be."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = tool_parser("bench_scheduler", __doc__, _EPILOG)
    parser.add_argument("--only", choices=("tree", "step"), help="one of the two parts (default: both)")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the tree (default: 100000)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (default: 16)")
    parser.add_argument("--context", type=int, default=8000, help="tokens of a prompt (default: 8000)")
    parser.add_argument("--repeats", type=int, default=2000, help="prompts matched per shape (default: 2000)")
    parser.add_argument(
        "--running", type=counts(4096), default=[1, 64, 256, 1024], help="running requests (default: 1,64,256,1024)"
    )
    parser.add_argument("--steps", type=int, default=400, help="steps measured per number (default: 400)")
    arguments = parser.parse_args(argv)
    for name in ("blocks", "block_size", "repeats", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if not 4 * arguments.block_size <= arguments.context <= 1 << 20:
        parser.error(f"--context: must be from four blocks to {1 << 20} tokens, not {arguments.context}")
    cores = len(os.sched_getaffinity(0))
    print(
        f"{cores} cores ({platform.machine()}), {platform.python_implementation()} {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    if arguments.only != "step":
        print_table(
            f"prefix of {arguments.context} tokens in {arguments.blocks} blocks of {arguments.block_size}: "
            "us a lookup, ns a block changed",
            ["tree", "nodes", "match:p50", "p99", "max", "peek:p50", "p99", "insert", "evict", "evict_1", "demote"],
            bench_tree(arguments.blocks, arguments.block_size, arguments.context, arguments.repeats),
        )
    if arguments.only != "tree":
        print_table(
            f"decode step with contexts of {arguments.context} tokens: us (medians; total is take + plan)",
            ["running", "take", "plan", "messages", "total:p50", "p99", "max"],
            bench_steps(arguments.running, arguments.context, arguments.steps, arguments.block_size),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
