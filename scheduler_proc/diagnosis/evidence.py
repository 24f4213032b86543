"""Sentences with the numbers that speak for a cause."""

from statistics import fmean

from scheduler_proc.diagnosis.changes import Change
from scheduler_proc.diagnosis.processes import Cpu
from scheduler_proc.diagnosis.workload import Facts

_WAITING_FOR = {
    "max_seqs": "a place among the running requests",
    "max_step_tokens": "room in a step",
    "prefill_chunk": "room in a step",
    "kv_blocks": "KV blocks",
    "max_itl_ms": "steps short enough for --max-itl-ms",
    "batch_wait_ms": "a batch to fill",
    "long_prompts": "their turn among long prompts",
    "prefer": "what --prefer puts first",
    "suspect": "a request that may have killed the ranks",
    "nothing": "the step that was running",
}


_LATE = 0.005  # seconds that a loop is late on average: no longer the usual turns of a busy machine
_LITTLE_WORK = 0.5  # cores


TOO_EARLY = "there have been too few steps, or prompts in them, to predict what a setting would change: ask again later"


def milliseconds(seconds: float) -> str:
    """For people: 0.0123 -> "12.3 ms", 2.5 -> "2.5 s"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def flag(setting: str, value: str) -> str:
    """As on the command line: what sets it to this value."""
    match value:
        case "on":
            return setting
        case "off":
            return f"--no-{setting.removeprefix('--')}"
        case "none":
            return f"no {setting}"
    return f"{setting} {value}"


def waiting(facts: Facts) -> str:
    """What requests waited for before their first step."""
    if not facts.limits:
        return "no request waited for longer than a step"
    name, share = max(facts.limits.items(), key=lambda item: item[1])
    return (
        f"{facts.waiting:.1f} requests waited on average, {percent(share)} of that for {_WAITING_FOR[name]}; "
        f"{milliseconds(facts.queue)} of {milliseconds(facts.ttft.mean)} to the first token"
    )


def batch(facts: Facts) -> str:
    """How long an idle engine waits for a batch to fill."""
    return (
        f"requests were there but no step was computed {percent(facts.starved)} of the time, as an idle engine waits "
        f"for a batch to fill; {milliseconds(facts.queue)} of {milliseconds(facts.ttft.mean)} to the first token are "
        "before the first step"
    )


def steps(facts: Facts) -> str:
    """How long steps took, and with what in them."""
    total = facts.steps
    count = max(1, total.steps)
    text = (
        f"a step takes {milliseconds(total.seconds / count)} with {total.decode_rows / count:.1f} decoding requests "
        f"and {total.prefill_tokens / count:.0f} prompt tokens on average"
    )
    if facts.itl.p99:
        text += f"; gaps between tokens: {milliseconds(facts.itl.mean)} on average, p99 {milliseconds(facts.itl.p99)}"
    return text


def prompts(facts: Facts) -> str:
    """What prompts cost."""
    return (
        f"prompts have {facts.prompt:.0f} tokens on average, {facts.cached:.0f} of them from the prefix cache; "
        f"computing one alone takes {milliseconds(facts.own)} of {milliseconds(facts.ttft.mean)} to the first token, "
        f"and sharing steps with others {milliseconds(facts.others)}"
    )


def blocks(facts: Facts) -> str:
    """How short KV memory is."""
    short = facts.limits.get("kv_blocks", 0.0)
    return (
        f"{percent(facts.kv_share)} of the KV blocks are in use on average, {percent(short)} of all waiting is for "
        f"blocks, and requests lost theirs {facts.totals.preemptions} times ({facts.totals.recomputed_tokens} tokens "
        "computed again)"
    )


def reservations(facts: Facts) -> str:
    """What blocks are kept for, and what they are needed for."""
    used, most = zip(*facts.spans, strict=True)
    return (
        f"{blocks(facts)}; --kv-shortage wait keeps blocks for {fmean(most):.0f} tokens of a request on average, and "
        f"requests have {fmean(used):.0f}, at most {max(used)}: a shorter context, which refuses longer ones, or "
        "max_tokens of each request keeps fewer"
    )


def repeated(facts: Facts) -> str:
    """What is computed although it has been before."""
    return (
        f"{percent(facts.repeated / max(1.0, facts.prompt))} of the prompts' tokens begin as earlier prompts did, "
        f"{percent(facts.cached / max(1.0, facts.prompt))} came from the prefix cache"
    )


def load(facts: Facts) -> str:
    """How little there is to do."""
    return (
        f"the engine had nothing to do {percent(facts.empty)} of the time; {facts.running:.1f} requests ran on average "
        f"and {facts.waiting:.1f} waited"
    )


def device(facts: Facts) -> str:
    """How busy the device is."""
    return f"the device computes {percent(facts.busy)} of the time; {steps(facts)}"


def front(cpu: Cpu) -> str:
    """What happens to a request before the scheduler has it."""
    return (
        f"before it is queued, a request waits {milliseconds(cpu.encode_wait)} for the tokenizer and takes "
        f"{milliseconds(cpu.encode)} of encoding, {milliseconds(cpu.render)} of its chat template and "
        f"{milliseconds(cpu.grammar)} of its grammar; the busiest tokenizer process uses {cpu.tokenizer_cores:.2f} "
        f"cores and is {milliseconds(cpu.tokenizer_lag)} late"
    )


def detokenizing(cpu: Cpu) -> str:
    """What tokens wait for on their way out."""
    return (
        f"turning tokens into text takes {cpu.detokenize_cores:.2f} cores of the tokenizer processes together; the "
        f"busiest one uses {cpu.tokenizer_cores:.2f} cores for all that it does, and its event loop is "
        f"{milliseconds(cpu.tokenizer_lag)} late"
    )


def scheduler(cpu: Cpu, facts: Facts) -> str:
    """How the device waits for a scheduler that does all that it can."""
    step = facts.steps.seconds / max(1, facts.steps.steps)
    return (
        f"the scheduler process uses {cpu.scheduler_cores:.2f} cores, and one is all that it can use; of the "
        f"{milliseconds(step)} that a step takes, the device does nothing for {milliseconds(facts.overhead)}. Fewer "
        "requests at once, longer steps, a faster core, or another engine beside it would help"
    )


def http(cpu: Cpu) -> str:
    """How busy the HTTP processes are."""
    return (
        f"the busiest frontend process uses {cpu.frontend_cores:.2f} cores, and its event loop is "
        f"{milliseconds(cpu.frontend_lag)} late on average"
    )


def late(cpu: Cpu) -> str:
    """What takes the time before the scheduler has a request, and why no setting changes it."""
    text = http(cpu) if cpu.frontend_lag > cpu.tokenizer_lag else front(cpu)
    lag, cores = max((cpu.frontend_lag, cpu.frontend_cores), (cpu.tokenizer_lag, cpu.tokenizer_cores))
    if lag < _LATE or cores > _LITTLE_WORK:
        return text
    return f"{text}; it has little to do, so something else takes the processor: a CPU limit, or other work"


def clients(cpu: Cpu) -> str:
    """What clients leave unread."""
    return f"{cpu.slow_clients:.1f} clients do not read what they are sent: {cpu.backlog:.0f} bytes wait for them"


def of(change: Change, facts: Facts) -> str:
    """What speaks for a change."""
    if change.setting in ("--prefix-cache", "--host-kv-memory"):
        return repeated(facts)
    if change.setting == "--batch-wait-ms":
        return batch(facts)
    if change.setting == "--max-model-len":
        return reservations(facts)
    if change.cause == "kv_memory":
        return blocks(facts)
    if change.cause == "queue":
        return waiting(facts)
    if change.cause == "prefill":
        return f"{prompts(facts)}; {steps(facts)}"
    return steps(facts)
