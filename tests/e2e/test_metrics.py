"""A real server's metrics and recorded trace: what dashboards ask for is there, and the numbers are the load's."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import REPOSITORY, SMALL, Server
from tests.e2e.sse import Answer, post_all
from tests.exposition import value

DASHBOARD = REPOSITORY / "docs" / "grafana.json"
COMPLETIONS = "/v1/completions"
SECRET = "Cobalt wombats never negotiate."
TURN = f"{SECRET} " * 12
ENDS = 6  # tokens of each output


def body(prompt: str, **more: object) -> dict[str, Any]:
    return {"model": "smol", "prompt": prompt, "max_tokens": ENDS, "temperature": 0, "ignore_eos": True, **more}


@dataclass
class Served:
    """What was sent to a server, and what was left of it."""

    answers: list[Answer]
    metrics: str
    record: Path


@pytest.fixture(scope="module")
def served(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One server, a conversation of two turns, a request with two choices, and its end."""
    record = tmp_path_factory.mktemp("record") / "trace.jsonl"
    with Server(model_path, *SMALL, "--metrics-prefix", "vllm", "--record", str(record)) as server:
        url = server.url + COMPLETIONS
        (first,) = post_all(url, [body(TURN, max_tokens=40)])
        (second,) = post_all(url, [body(TURN + first.text + " And then?")])
        (pair,) = post_all(url, [body("One, two,", n=2)])
        answers = [first, second, pair]
        deadline = time.monotonic() + 20
        while True:
            with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
                metrics = response.read().decode()
            # The scheduler's numbers come a few times a second, those of the other processes through it.
            counted = [value(metrics, f"vllm:{name}_total") for name in ("requests_finished", "tokenizer_prompts")]
            if counted == [4, 3] and 'process="worker-0"' in metrics:
                break
            assert time.monotonic() < deadline, metrics
            time.sleep(0.1)
    return Served(answers, metrics, record)


def test_every_metric_of_the_dashboard_is_there(served: Served) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    asked = {name for query in queries for name in re.findall(r"\$\{prefix\}:(\w+)", query)}
    assert len(asked) > 25
    there = set(re.findall(r"^vllm:(\w+)(?=\{)", served.metrics, re.MULTILINE))
    assert asked <= there, asked - there
    labels = {name for query in queries for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(", ")}
    assert labels <= set(re.findall(r"[{,](\w+)=", served.metrics))


def test_every_metric_is_documented_and_nothing_else(served: Served) -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    there = {family.name.removeprefix("vllm:") for family in text_string_to_metric_families(served.metrics)}
    assert sorted(documented) == sorted(there)


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_is_of_grafanas_form() -> None:
    """What Grafana's import and its panels need; https://grafana.com/docs, dashboard JSON model."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36  # from there on a data source is an object with type and uid
    assert "id" not in dashboard  # that of somebody's database
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    texts = [DASHBOARD.read_text(), *(target["expr"] for panel in panels for target in panel.get("targets", ()))]
    used = {name for text in texts for pair in re.findall(r"\$\{(\w+)\}|\$(\w+)", text) for name in pair if name}
    assert used - {"__rate_interval"} == set(variables)
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        assert all(panel["gridPos"][side] >= low for side, low in (("x", 0), ("y", 0), ("w", 1), ("h", 1)))
        if panel["type"] == "row":
            assert panel["gridPos"]["w"] == 24
            assert panel["collapsed"] is False  # then the panels below it are not inside of it
            continue
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in {"s", "reqps", "short", "percentunit"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert all(target["expr"].count(pair[0]) == target["expr"].count(pair[1]) for pair in ("()", "{}", "[]"))
            assert target["legendFormat"]
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert all(set(labels) <= set(group.split(", ")) for group in grouped)


def test_what_is_counted_is_what_clients_were_told(served: Served) -> None:
    text = served.metrics
    completion = sum(answer.usage["completion_tokens"] for answer in served.answers)
    assert value(text, "vllm:generation_tokens_total") == completion
    assert value(text, "vllm:request_generation_tokens_sum") == completion
    assert value(text, "vllm:output_tokens_sum", route=COMPLETIONS, key="none") == completion
    assert value(text, "vllm:output_finishes_total", finished_reason="length") == 4
    assert value(text, "vllm:output_max_tokens_sum") == 40 + 3 * ENDS
    assert value(text, "vllm:request_params_n_sum") == 4
    assert value(text, "vllm:iteration_tokens_total_sum") == value(text, "vllm:computed_tokens_total")
    assert value(text, "vllm:iteration_tokens_total_count") == value(text, "vllm:engine_steps_total")
    assert value(text, "vllm:steps_limited_total") == value(text, "vllm:engine_steps_total")


def test_each_choice_has_gone_through_all_phases(served: Served) -> None:
    text = served.metrics
    total = 0.0
    for phase in ("queue", "prefill", "decode"):
        assert value(text, f"vllm:request_{phase}_time_seconds_count") == 4
        total += value(text, f"vllm:request_{phase}_time_seconds_sum")
    inside = value(text, "vllm:request_inference_time_seconds_sum")
    assert inside == pytest.approx(total - value(text, "vllm:request_queue_time_seconds_sum"))
    # Two choices of one request take their time together.
    assert total < 2 * value(text, "vllm:e2e_request_latency_seconds_sum")


def test_every_process_tells_what_it_uses(served: Served) -> None:
    for process in ("frontend-0", "tokenizer-0", "scheduler", "worker-0"):
        assert value(served.metrics, "vllm:process_cpu_seconds_total", process=process) > 0
    for process in ("frontend-0", "tokenizer-0", "scheduler"):
        assert value(served.metrics, "vllm:event_loop_lag_seconds_count", process=process) > 0
    assert value(served.metrics, "vllm:worker_seconds_total", phase="forward") > 0
    assert value(served.metrics, "vllm:tokenizer_prompts_total") == 3


def test_the_record_has_the_lengths_and_what_was_shared(served: Served) -> None:
    first, second, pair = [json.loads(line) for line in served.record.read_text().splitlines()]
    assert [line["input_length"] for line in (first, second, pair)] == [
        answer.usage["prompt_tokens"] for answer in served.answers
    ]
    assert [first["output_length"], second["output_length"], pair["output_lengths"]] == [40, ENDS, [ENDS, ENDS]]
    assert first["timestamp"] < second["timestamp"] < pair["timestamp"]
    known = first["hash_ids"][: first["input_length"] // first["block_size"]] + first["output_hash_ids"]
    shared = sum(ours == theirs for ours, theirs in zip(second["hash_ids"], known, strict=False))
    assert shared * first["block_size"] == second["cached_tokens"] > len(first["hash_ids"]) * first["block_size"] - 16
    text = served.record.read_text()
    assert not set(re.findall(r"[A-Za-z]{4,}", text)) & set(SECRET.split())


def test_a_simulation_reads_the_record(served: Served, tmp_path: Path) -> None:
    # Ten times as much time between arrivals: however fast this machine is beside the simulated one, each request has
    # ended before the next one comes, as each client here has waited for the last answer.
    command = [sys.executable, "-m", "tools.simulate", "--trace", str(served.record), "--rate-scale", "0.1"]
    command += ["--json", str(tmp_path / "json")]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    (run,) = json.loads((tmp_path / "json").read_text())["runs"]
    first, second, pair = [answer.usage["prompt_tokens"] for answer in served.answers]
    assert run["prompt_tokens"] == first + second + 2 * pair
    # A conversation's next turn finds what the engine has said, as in the real server.
    recorded = [json.loads(line) for line in served.record.read_text().splitlines()]
    assert run["hit_rate"] * run["prompt_tokens"] == pytest.approx(recorded[1]["cached_tokens"])
