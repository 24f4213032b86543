"""Loads and servers of which one thing, or two, is wrong: what the drill of the diagnosis is made of."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ipc.stats_messages import MetricName

Draw = random.Random


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A closed loop of clients; lengths in tokens. Prompts are random, after `shared` tokens that all of them have.

    Outputs have half to one and a half times their length.
    """

    metric: MetricName  # which suffers
    flags: tuple[str, ...] = ()
    clients: int
    prompt: int
    outputs: int
    shared: int = 0
    long: int = 0  # the prompts of the first client
    as_text: bool = False  # prompts are words, for the tokenizer to encode
    fields: int = 0  # of the JSON schema that each request brings, no two alike
    think: float = 0.0  # seconds that a client waits before its next request
    reads: float = 0.0  # bytes a second that a client takes in; 0: all at once
    starved: str = ""  # the package whose processes get
    share: float = 1.0  # of the time each to run in


def _few_places(draw: Draw) -> Scenario:
    flags = ("--max-seqs", str(draw.choice((2, 3))))
    return Scenario(
        metric="ttft", flags=flags, clients=8, prompt=draw.randrange(20, 60), outputs=draw.randrange(20, 50)
    )


def _few_blocks(draw: Draw) -> Scenario:
    flags = ("--kv-memory", f"{draw.randrange(12, 21)}MiB", "--max-model-len", "512")
    return Scenario(
        metric="throughput",
        flags=flags,
        clients=draw.randrange(12, 21),
        prompt=draw.randrange(100, 200),
        outputs=draw.randrange(80, 120),
    )


def _small_steps(draw: Draw) -> Scenario:
    flags = ("--max-step-tokens", str(draw.choice((16, 24))), "--max-seqs", "8")
    return Scenario(
        metric="ttft",
        flags=flags,
        clients=draw.randrange(5, 9),
        prompt=draw.randrange(150, 300),
        outputs=draw.randrange(8, 20),
    )


def _huge_prompts(draw: Draw) -> Scenario:
    return Scenario(
        metric="ttft",
        clients=draw.randrange(2, 4),
        prompt=draw.randrange(1200, 1800),
        outputs=draw.randrange(10, 30),
    )


def _no_prefix_cache(draw: Draw) -> Scenario:
    return Scenario(
        metric="ttft",
        flags=("--no-prefix-cache",),
        clients=draw.randrange(3, 6),
        prompt=draw.randrange(20, 60),
        outputs=draw.randrange(20, 40),
        shared=draw.randrange(500, 1000),
    )


def _one_stream(draw: Draw) -> Scenario:
    flags = draw.choice(((), ("--threads", "1"), ("--quantization", "none")))
    return Scenario(metric="itl", flags=flags, clients=1, prompt=20, outputs=draw.randrange(100, 200))


def _long_among_short(draw: Draw) -> Scenario:
    return Scenario(
        metric="itl_p99",
        clients=draw.randrange(5, 8),
        prompt=20,
        outputs=draw.randrange(40, 80),
        long=draw.randrange(1200, 1900),
    )


def _slow_clients(draw: Draw) -> Scenario:
    return Scenario(
        metric="itl",
        clients=draw.randrange(3, 6),
        prompt=20,
        outputs=draw.randrange(150, 250),
        reads=draw.uniform(6e3, 9e3),
    )


def _slow_tokenizer(draw: Draw) -> Scenario:
    return Scenario(
        metric="ttft",
        clients=draw.randrange(3, 6),
        prompt=draw.randrange(50, 100),
        outputs=draw.randrange(10, 20),
        as_text=True,
        starved="tokenizer_proc",
        share=draw.uniform(0.1, 0.3),
    )


def _starved_http(draw: Draw) -> Scenario:
    return Scenario(
        metric="ttft",
        clients=draw.randrange(3, 6),
        prompt=20,
        outputs=draw.randrange(15, 30),
        starved="frontend",
        share=draw.uniform(0.1, 0.3),
    )


def _grammars(draw: Draw) -> Scenario:
    return Scenario(
        metric="ttft",
        clients=draw.randrange(6, 10),
        prompt=20,
        outputs=draw.randrange(6, 12),
        fields=draw.randrange(30, 60),
    )


def _idle(draw: Draw) -> Scenario:
    return Scenario(
        metric="throughput",
        clients=1,
        prompt=20,
        outputs=draw.randrange(20, 40),
        think=draw.uniform(1.0, 2.0),
    )


def _balanced(draw: Draw) -> Scenario:
    return Scenario(
        metric="itl",
        clients=draw.randrange(3, 6),
        prompt=draw.randrange(20, 40),
        outputs=draw.randrange(80, 120),
    )


def _places_and_steps(draw: Draw) -> Scenario:
    return replace(_small_steps(draw), flags=("--max-step-tokens", "16", "--max-seqs", "2"), clients=8)


def _places_and_cache(draw: Draw) -> Scenario:
    return replace(_no_prefix_cache(draw), flags=("--no-prefix-cache", "--max-seqs", "2"), clients=8)


def _blocks_and_places(draw: Draw) -> Scenario:
    scenario = _few_blocks(draw)
    return replace(scenario, flags=(*scenario.flags, "--max-seqs", str(draw.randrange(2, 5))))


def _bits_and_threads(draw: Draw) -> Scenario:
    return replace(_one_stream(draw), flags=("--quantization", "none", "--threads", "1"))


_MADE: Mapping[str, Callable[[Draw], Scenario]] = {
    "slow tokenizer": _slow_tokenizer,
    "few blocks": _few_blocks,
    "small steps": _small_steps,
    "huge prompts": _huge_prompts,
    "no prefix cache": _no_prefix_cache,
    "one stream": _one_stream,
    "long among short": _long_among_short,
    "slow clients": _slow_clients,
    "starved HTTP": _starved_http,
    "grammars": _grammars,
    "idle": _idle,
    "balanced": _balanced,
    "few places": _few_places,
    "few places, small steps": _places_and_steps,
    "few places, no cache": _places_and_cache,
    "few blocks, few places": _blocks_and_places,
    "float weights, one thread": _bits_and_threads,
}
NAMES = tuple(_MADE)


def scenario(name: str, seed: int) -> Scenario:
    """With parameters drawn from a seed."""
    return _MADE[name](Draw(f"{seed} {name}"))
