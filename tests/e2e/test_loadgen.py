"""The load generator against the real server: exact counts, real sharing, both timelines of one request."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.sse import post_all
from tools.loadgen.__main__ import main
from tools.loadgen.messages import Item
from tools.loadgen.options import build_parser
from tools.loadgen.prompts import Prompts
from tools.loadgen.session import Load, Session, read_load

# A test machine may be busy: what the client says of itself is not what these tests are about.
LENIENT = ("--max-send-lag-ms", "1e6", "--max-loop-lag-ms", "1e6", "--max-cpu", "100")


def run(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Records and summary of a run that answers everything."""
    records, report = folder / "records.jsonl", folder / "report.json"
    assert main(["--records", str(records), "--json", str(report), *LENIENT, *flags]) == 0
    return [json.loads(line) for line in records.read_text().splitlines()], json.loads(report.read_text())["summary"]


@pytest.mark.parametrize("way", ["http", "sdk"])
@pytest.mark.parametrize("api", ["tokens", "chat"])
def test_counts_are_exact_and_every_request_has_its_timeline(
    way: str, api: str, server: Server, endpoint: str, tmp_path: Path
) -> None:
    where = ("--url", server.url) if way == "http" else ("--sdk", endpoint)
    flags = ("--requests", "10", "--arrivals", "poisson:20", "--input-tokens", "uniform:1,60", "--seed", "3")
    records, summary = run(tmp_path, *where, *flags, "--output-tokens", "uniform:1,12", "--api", api)
    assert summary["outcomes"] == {"ok": 10}
    assert summary["prompt_exact"] == {"compared": 10, "exact": 10, "differences": {}}
    assert summary["output_exact"] == {"compared": 10, "exact": 10, "differences": {}}
    assert summary["output_tokens"] == sum(record["output_length"] for record in records)
    assert summary["miscounted"] == summary["uncounted"] == 0
    assert summary["agreement"]["joined"] == 10
    for record in records:
        assert sum(record["tokens"]) == record["completion_tokens"] == record["output_length"]
        timings = record["timings"]
        [choice] = timings["choices"]
        assert timings["request_id"] == record["id"]
        assert choice["prompt_tokens"] == record["prompt_tokens"]
        assert choice["completion_tokens"] == record["completion_tokens"]
        # What the server did, it did while the client waited.
        assert 0 <= choice["first_token_ms"] <= (record["times"][0] - record["sent"]) * 1e3
        assert choice["finished_ms"] <= (record["ended"] - record["sent"]) * 1e3


def test_a_prefix_that_a_trace_shares_is_found_in_the_cache(server: Server, tmp_path: Path) -> None:
    row = {"timestamp": 0, "output_length": 2, "block_size": 32}
    rows = [
        row | {"input_length": 100, "hash_ids": [1, 2, 3, 4]},
        row | {"input_length": 90, "hash_ids": [1, 2, 5]},
        row | {"input_length": 90, "hash_ids": [6, 2, 5]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in rows))
    records, _ = run(tmp_path, "--url", server.url, "--trace", str(trace), "--arrivals", "closed:1")
    assert [record["cached_tokens"] for record in records] == [0, 64, 0]


def test_200_texts_of_1024_tokens_are_exact_for_the_real_tokenizer_b096(server: Server) -> None:
    """As `/tokenize` counts them; prompts of a run are compared with `usage.prompt_tokens` each time."""

    async def texts(api: str) -> tuple[list[str], int]:
        arguments = build_parser().parse_args(["--url", server.url, "--api", api, "--requests", "200"])
        session = Session(arguments)
        load: Load = read_load(arguments)
        await session.prepare(load)
        prompts = Prompts(1, (0, 1), session.words)
        return [prompts.text(Item(index, 0.0, 1024)) for index in range(200)], session.added_tokens

    for api in ("text", "chat"):
        found, added = asyncio.run(texts(api))
        assert len(set(found)) == 200
        bodies: list[Any] = [
            {"prompt": text} if api == "text" else {"messages": [{"role": "user", "content": text}]} for text in found
        ]
        counts = [answer.body["count"] for answer in post_all(server.url + "/tokenize", bodies, at_once=False)]
        assert counts == [1024 + added] * 200
