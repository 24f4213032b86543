"""The rows of the tables: which numbers are shown, and how."""

from collections.abc import Sequence

from tools.reports.table import Rows, seconds
from tools.simulate.summary import PERCENTILES, Latencies, Spread, Summary


def latency_rows(columns: Sequence[Latencies]) -> Rows:
    first = columns[0]
    rows: Rows = [
        ("requests", [f"{column.requests:,}" for column in columns]),
        (
            "finished / refused / failed",
            [f"{column.finished:,} / {column.refused:,} / {column.failed:,}" for column in columns],
        ),
    ]
    if any(column.aborted for column in columns):
        rows.append(("aborted by clients", [f"{column.aborted:,}" for column in columns]))
    spreads: list[tuple[str, list[Spread]]] = [
        ("TTFT", [column.ttft for column in columns]),
        ("ITL", [column.itl for column in columns]),
        ("TPOT", [column.tpot for column in columns]),
        ("queue time", [column.queue for column in columns]),
        ("E2E", [column.e2e for column in columns]),
    ]
    for name, values in spreads:
        for percent in PERCENTILES:
            rows.append((f"{name} p{percent}", [seconds(getattr(value, f"p{percent}")) for value in values]))
    slo = f"TTFT {seconds(first.slo_ttft)}, TPOT {seconds(first.slo_tpot)}"
    rows += [
        (f"goodput ({slo})", [f"{column.goodput:.3f} req/s" for column in columns]),
        (
            "requests within the SLO",
            [
                f"{column.met_slo:,} ({column.met_slo / max(1, column.requests - column.aborted):.1%})"
                for column in columns
            ],
        ),
        ("output throughput", [f"{column.output_throughput:,.1f} tok/s" for column in columns]),
        ("time, first arrival to last output", [seconds(column.seconds) for column in columns]),
    ]
    return rows


def summary_rows(columns: Sequence[Summary]) -> Rows:
    rows = latency_rows([column.latencies for column in columns])
    rows += [
        ("prompt throughput", [f"{column.prompt_throughput:,.1f} tok/s" for column in columns]),
        ("KV blocks", [f"{column.kv_blocks:,}" for column in columns]),
        ("KV use mean / peak", [f"{column.kv_mean:.1%} / {column.kv_peak:.1%}" for column in columns]),
        ("prompt tokens from the cache", [f"{column.hit_rate:.2%}" for column in columns]),
        ("the same, cache without a limit", [f"{column.infinite_hit_rate:.2%}" for column in columns]),
        ("refused: would be late", [f"{column.refused_deadline:,}" for column in columns]),
        ("preemptions", [f"{column.preemptions:,}" for column in columns]),
        ("tokens computed again", [f"{column.recomputed_tokens:,}" for column in columns]),
        (
            "blocks swapped out / in",
            [f"{column.swapped_out_blocks:,} / {column.swapped_in_blocks:,}" for column in columns],
        ),
        ("steps", [f"{column.steps:,}" for column in columns]),
        ("device busy", [f"{column.device_busy:.1%}" for column in columns]),
        ("scheduler decisions", [f"{column.decisions:,}" for column in columns]),
        ("decisions per second of real time", [f"{column.decisions_per_second:,.0f}" for column in columns]),
        ("real time", [seconds(column.real_seconds) for column in columns]),
    ]
    return rows
