"""What is advised exists, and causes that no setting of the scheduler changes are named."""

import ast
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from config.schema import SchedulerConfig
from config.sources import options, read_settings
from ipc.stats_messages import Diagnosis
from scheduler_proc import diagnosis
from scheduler_proc.cost_model import CostModel
from scheduler_proc.diagnosis import evidence
from scheduler_proc.diagnosis.changes import Engine, Proposals, setup_of
from scheduler_proc.diagnosis.diagnoser import diagnose
from scheduler_proc.diagnosis.evidence import flag
from scheduler_proc.diagnosis.processes import Cpu
from scheduler_proc.diagnosis.what_if import Replay
from scheduler_proc.diagnosis.workload import Facts
from tests.sim.loads import Observed, finish, load

FLAGS = {option.flag for option in options()}
SOURCES = sorted(Path(diagnosis.__file__).parent.glob("*.py"))
BUSY = load(1, 80, 4, 100, 40)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_flag_that_is_named_exists(path: Path) -> None:
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    named = {text for text in strings if isinstance(text, str) and text.startswith("--") and text != "--no-"}
    assert named - {"--"} <= FLAGS


@pytest.mark.parametrize(
    "settings",
    [
        SchedulerConfig(max_seqs=2),
        SchedulerConfig(max_step_tokens=32, max_seqs=16),
        SchedulerConfig(prefix_cache=False),
        SchedulerConfig(max_itl_ms=10),
        SchedulerConfig(kv_shortage="wait"),
    ],
    ids=lambda settings: repr(settings)[:40],
)
def test_what_is_advised_is_a_value_that_the_server_takes(settings: SchedulerConfig) -> None:
    told = Observed(load(2, 60, 5, 100, 60, shared=128), settings, 40).diagnosis()
    causes = [cause for metric in told.metrics for cause in metric.causes if cause.setting]
    assert causes
    for cause in causes:
        if cause.after != "none":
            read_settings([*flag(cause.setting, cause.after).split(), "--model", "none"], {}, "")


def test_values_as_on_the_command_line() -> None:
    assert flag("--max-seqs", "8") == "--max-seqs 8"
    assert flag("--prefix-cache", "on") == "--prefix-cache"
    assert flag("--prefix-cache", "off") == "--no-prefix-cache"
    assert flag("--max-itl-ms", "none") == "no --max-itl-ms"


def first(told: Diagnosis, name: str) -> tuple[str, str]:
    [metric] = [metric for metric in told.metrics if metric.name == name]
    return metric.causes[0].cause, metric.causes[0].setting


def test_a_slow_tokenizer_is_what_holds_first_tokens_back() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    slow = Cpu(tokenizer_cores=1.0, tokenizer_lag=0.05, encode=0.1, encode_wait=2.0)
    told = observed.diagnosis(slow)
    assert first(told, "ttft") == ("cpu", "--tokenizers")
    [ttft] = [metric for metric in told.metrics if metric.name == "ttft"]
    assert ttft.value == pytest.approx(observed.metrics["ttft"] + slow.front)
    assert dict(ttft.parts)["tokenizer and HTTP"] == pytest.approx(slow.front)
    assert first(observed.diagnosis(), "ttft")[0] != "cpu"


def test_a_starved_frontend_is_found() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    assert first(observed.diagnosis(Cpu(frontend_cores=1.0, frontend_lag=0.5)), "ttft") == ("cpu", "--frontends")


def advice(told: Diagnosis, name: str, setting: str) -> list[float]:
    """What is predicted of a metric with that setting changed."""
    [metric] = [metric for metric in told.metrics if metric.name == name]
    return [cause.predicted for cause in metric.causes if cause.setting == setting]


def test_waiting_to_be_encoded_is_no_part_of_the_time_between_tokens() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    itl = observed.metrics["itl"]
    waits = Cpu(tokenizer_cores=1.0, encode_wait=20 * itl, child_wait=itl)
    assert advice(observed.diagnosis(waits), "itl", "--tokenizers") == []
    late = replace(waits, tokenizer_lag=itl / 2, frontend_cores=1.0, frontend_lag=2 * itl)
    told = observed.diagnosis(late)
    # Twice, on the way in and on the way out: a gap and as much again, of which half of the second goes.
    assert advice(told, "itl", "--tokenizers") == [pytest.approx(itl * 1.5 / 2, rel=0.02)]
    assert advice(told, "itl", "--frontends") == [pytest.approx(itl * (1 + 2) / (1 + 4), rel=0.02)]


@pytest.mark.parametrize("seconds", [0.001, 0.1, 10.0, 1000.0])
def test_no_latency_is_predicted_to_vanish(seconds: float) -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    slow = Cpu(
        tokenizer_cores=1.0,
        frontend_cores=1.0,
        tokenizer_lag=seconds,
        frontend_lag=seconds,
        encode_wait=seconds,
        child_wait=seconds,
        grammar=seconds,
    )
    for metric in observed.diagnosis(slow).metrics:
        for cause in metric.causes:
            if cause.cause == "cpu" and cause.setting:
                assert metric.value / 2 <= cause.predicted < metric.value, (metric.name, cause.setting)


def test_a_process_with_little_to_do_that_is_late_is_not_helped_by_another_one() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    for starved in (
        Cpu(frontend_cores=0.02, frontend_lag=0.5),
        Cpu(tokenizer_cores=0.02, tokenizer_lag=0.5, frontend_lag=0.1),
    ):
        told = observed.diagnosis(starved)
        assert first(told, "ttft") == ("cpu", "")
        assert "something else takes the processor" in told.metrics[0].causes[0].evidence


def test_grammars_that_wait_for_each_other_need_another_tokenizer() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    assert first(observed.diagnosis(Cpu(grammar=2.0, child_wait=1.8)), "ttft") == ("cpu", "--tokenizers")
    assert first(observed.diagnosis(Cpu(grammar=2.0, child_wait=0.0)), "ttft") == ("cpu", "")


def test_clients_that_do_not_read_come_before_all_settings() -> None:
    told = Observed(BUSY, SchedulerConfig(max_seqs=2), 10_000).diagnosis(Cpu(slow_clients=3.0, backlog=1e6))
    assert first(told, "throughput") == ("client", "")
    assert "3.0 clients" in told.metrics[1].causes[0].evidence


@pytest.mark.parametrize(("dequantized", "advised"), [(2.7, ("decode", "--quantization")), (1.0, ("decode", ""))])
def test_one_stream_is_faster_with_the_integers_of_the_file(
    monkeypatch: pytest.MonkeyPatch, dequantized: float, advised: tuple[str, str]
) -> None:
    observed = Observed(load(5, 12, 1, 20, 80), SchedulerConfig(), 10_000, clients=1)
    engine = observed.engine()
    model = msgspec.structs.replace(engine.config.model, quantization="none")
    config = msgspec.structs.replace(engine.config, model=model)
    monkeypatch.setattr(observed, "engine", lambda: replace(engine, config=config, dequantized=dequantized))
    assert first(observed.diagnosis(), "itl") == advised


def test_where_no_request_came_to_its_end_there_is_a_diagnosis_all_the_same() -> None:
    """They were failed after some tokens, of which the window keeps nothing else."""
    observed = Observed(load(4, 12, 0.05, 30, 20), SchedulerConfig(), 10_000)
    facts = observed.facts()
    facts = replace(facts, load=facts.load._replace(jobs=[]))
    told = finish(diagnose(observed.engine(), facts, observed.cost, Cpu(), 0.0))
    assert told.summary.startswith("not enough load")


def test_before_anything_is_known_of_steps_nothing_is_said_of_settings() -> None:
    observed = Observed(load(1, 80, 4, 100, 40), SchedulerConfig(max_seqs=2), 10_000)
    told = finish(diagnose(observed.engine(), observed.facts(), CostModel(), Cpu(), 0.0))
    assert told.summary == evidence.TOO_EARLY
    assert {(cause.evidence, cause.confidence) for metric in told.metrics for cause in metric.causes} == {
        (evidence.TOO_EARLY, 0.0)
    }


def test_nothing_to_do_is_told_as_such() -> None:
    told = Observed(load(4, 12, 0.05, 30, 20), SchedulerConfig(), 10_000).diagnosis()
    assert told.summary.startswith("not enough load")
    [throughput] = [metric for metric in told.metrics if metric.name == "throughput"]
    assert throughput.causes[0].cause == "load"
    # What could be: 64 requests in each step, of 5 ms and 1.1 ms for each, and their prompts of 0.9 ms a token. Nobody
    # has seen such a batch, so what a further request costs is a guess.
    assert throughput.causes[0].predicted == pytest.approx(1 / (0.0011 + 0.005 / 64 + 30 * 0.0009 / 20), rel=0.3)


def test_what_helps_one_metric_at_the_price_of_another_is_told_as_such() -> None:
    """Long prompts among short ones: gaps between tokens are long in few steps, and shorter where prompts wait."""
    told = Observed(load(2, 90, 1, 20, 60, long=2000, every=15), SchedulerConfig(), 10_000, clients=6).diagnosis()
    assert told.summary.startswith("itl_p99 is bound by prefill: ")
    [metric] = [metric for metric in told.metrics if metric.name == "itl_p99"]
    turn = flag(metric.causes[0].setting, metric.causes[0].after)
    [ttft] = [metric.value for metric in told.metrics if metric.name == "ttft"]
    gained, lost = metric.value / metric.causes[0].predicted, dict(metric.causes[0].effects)["ttft"] / ttft
    assert lost > 1.2
    assert f"; {turn} would make it {gained:.1f} times as good, and ttft {lost:.1f} times as bad" in told.summary


def test_parts_of_latencies_add_up() -> None:
    told = Observed(BUSY, SchedulerConfig(max_seqs=3), 10_000).diagnosis(Cpu(encode=0.01))
    for metric in told.metrics:
        if metric.name in ("ttft", "itl"):
            assert sum(value for _, value in metric.parts) == pytest.approx(metric.value, rel=0.02), metric.name


def test_tokens_that_wait_to_become_text_are_told_of() -> None:
    observed = Observed(load(3, 60, 1, 30, 20), SchedulerConfig(), 10_000)
    told = observed.diagnosis(Cpu(tokenizer_cores=0.95, tokenizer_lag=0.1, detokenize_cores=0.83))
    assert dict(told.measures)["detokenize_cores"] == 0.83
    [itl] = [metric for metric in told.metrics if metric.name == "itl"]
    [cause] = [cause for cause in itl.causes if cause.setting == "--tokenizers"]
    assert "turning tokens into text takes 0.83 cores" in cause.evidence


@pytest.mark.parametrize(("cores", "gap", "bound"), [(0.98, 0.02, True), (0.3, 0.02, False), (0.98, 0.0001, False)])
def test_a_scheduler_that_does_all_it_can_is_named(cores: float, gap: float, bound: bool) -> None:
    """`gap`: seconds of a step in which the device does nothing."""
    observed = Observed(load(3, 100, 1, 30, 40), SchedulerConfig(max_seqs=8), 10_000, clients=8)
    facts = observed.facts()
    step = facts.steps.busy / facts.steps.steps
    facts.steps.seconds = facts.steps.busy + gap * facts.steps.steps
    told = finish(diagnose(observed.engine(), facts, observed.cost, Cpu(scheduler_cores=cores), 0.0))
    found = {
        metric.name: cause.predicted / metric.value
        for metric in told.metrics
        for cause in metric.causes
        if cause.cause == "cpu" and "the scheduler process uses" in cause.evidence
    }
    assert ("the scheduler process uses" in told.summary) is bound
    share = step / (step + gap)
    expected = {"itl": pytest.approx(share), "throughput": pytest.approx(1 / share)}
    assert found == (expected if bound else {})


LONGEST = 512  # tokens of the context


def reserving(asked: int) -> tuple[Observed, Engine, Facts]:
    """A run under `wait` of requests that have kept blocks for all of a context; one has asked for so many tokens."""
    observed = Observed(load(2, 120, 6, 100, 60), SchedulerConfig(kv_shortage="wait"), 44)
    kept = [request._replace(most=LONGEST - request.prompt) for request in observed.window.ended]
    kept[0] = kept[0]._replace(most=asked)
    observed.window.ended.clear()
    observed.window.ended.extend(kept)
    engine = observed.engine()
    model = msgspec.structs.replace(engine.config.model, max_model_len=LONGEST)
    return observed, replace(engine, config=msgspec.structs.replace(engine.config, model=model)), observed.facts()


@pytest.mark.parametrize("asked", [80, 200])
def test_blocks_kept_for_outputs_that_do_not_come_are_found(asked: int) -> None:
    observed, engine, facts = reserving(asked)
    setup = setup_of(engine, observed.cost, facts.overhead)
    [change] = [
        change for change in Proposals(engine, facts, setup, observed.cost) if change.setting == "--max-model-len"
    ]
    length = int(change.after)
    used = max(request.prompt + request.outputs for request in observed.window.ended)
    assert max(used, observed.window.ended[0].prompt + asked) <= length < LONGEST
    # 704 tokens in the pool: one context at a time, or two of what requests come to with some room.
    before, after = (finish(Replay(load, setup).run()) for load in (facts.load, change.load))
    assert after.throughput > 1.3 * before.throughput
    assert after.ttft.mean < before.ttft.mean
    text = evidence.of(change, facts)
    assert f"at most {used}" in text
    assert "max_tokens" in text


def test_a_context_that_somebody_asks_for_stays() -> None:
    observed, engine, facts = reserving(LONGEST - 150)
    setup = setup_of(engine, observed.cost, facts.overhead)
    assert "--max-model-len" not in {change.setting for change in Proposals(engine, facts, setup, observed.cost)}
