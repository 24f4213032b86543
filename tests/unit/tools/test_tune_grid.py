"""Combinations that the user names: which they are, which are measured, and how the choice stands beside them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.arch import read_arch
from config.machine import Machine
from config.schema import Config, ModelConfig, SchedulerConfig, WorkerConfig
from tests.unit.tools.test_tune_report import arm, found
from tools.loadgen.slo import Slo
from tools.tune.comparing import Comparison, compared, comparison_text, overview
from tools.tune.grid import GridError, parse_grid
from tools.tune.space import Space, Workload
from tools.tune.trials import cells_of


def space(model_path: Path, **given: Any) -> Space:
    return Space(
        Config(
            model=ModelConfig(model="m"),
            scheduler=SchedulerConfig(**given),
            worker=WorkerConfig(device="cpu", kv_memory="64MiB"),
        ),
        read_arch(model_path),
        Machine(cores=4, memory_available=8 << 30, native_kernels=True),
        given=given,
        slo=Slo(ttft=1.0),
        workload=Workload(longest_prompt=600, requests=100, shares_prefixes=False),
    )


def test_every_value_meets_every_other() -> None:
    assert parse_grid("max-seqs=8,32  --max-itl-ms=40.5 prefer=mixed,decode") == [
        {"max_seqs": 8, "max_itl_ms": 40.5, "prefer": "mixed"},
        {"max_seqs": 8, "max_itl_ms": 40.5, "prefer": "decode"},
        {"max_seqs": 32, "max_itl_ms": 40.5, "prefer": "mixed"},
        {"max_seqs": 32, "max_itl_ms": 40.5, "prefer": "decode"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be settings and their values"),
        ("max-seqs", "not 'max-seqs'"),
        ("max-seqs=", "not 'max-seqs='"),
        ("block-size=16", "'block_size' is none of max_seqs"),
        ("max-seqs=0,8", "--max-seqs: must be a whole number from 1 to 4096, not '0'"),
        ("max-seqs=8,", "--max-seqs: must be a whole number from 1 to 4096, not ''"),
        ("max-itl-ms=nan", "--max-itl-ms: must be a number from 1 to 60000, not 'nan'"),
        ("prefer=best", "--prefer: must be one of mixed, prefill, decode, not 'best'"),
        ("max-seqs=8,9,8", "--max-seqs: 8,9,8 has one value twice"),
        ("max-seqs=8 max_seqs=9", "--max-seqs stands there twice"),
        (f"max-seqs={','.join(map(str, range(1, 66)))}", "65 combinations are more than 64"),
    ],
)
def test_what_is_no_grid_is_said_with_the_setting_and_its_limit(text: str, message: str) -> None:
    with pytest.raises(GridError) as refused:
        parse_grid(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_each_combination_is_measured_once_and_what_cannot_be_is_told(model_path: Path) -> None:
    told: list[str] = []
    grids = [parse_grid("max-seqs=8,128 max-step-tokens=64,512"), parse_grid("max-seqs=8 max-step-tokens=512")]
    cells = cells_of(space(model_path), grids, told.append)
    assert [cell.flags for cell in cells] == [
        ["--max-seqs=8", "--max-step-tokens=64"],
        ["--max-seqs=8", "--max-step-tokens=512"],
        ["--max-seqs=128", "--max-step-tokens=512"],
    ]
    assert cells[0].candidate.config.max_seqs == 8
    assert cells[0].candidate.config.max_step_tokens == 64
    (reason,) = told
    assert reason.startswith("--max-seqs=128 --max-step-tokens=64: ")


def test_values_that_the_server_would_take_anyway_are_the_defaults(model_path: Path) -> None:
    plain = space(model_path)
    settled = plain.default.config
    (cell,) = cells_of(plain, [parse_grid(f"max-seqs={settled.max_seqs} prefer={settled.prefer}")], pytest.fail)
    assert cell.candidate == plain.default


@pytest.mark.parametrize(
    ("given", "grids", "message"),
    [
        ({}, ["max-seqs=128 max-step-tokens=64"], "would refuse every combination"),
        ({"max_seqs": 8}, ["max-seqs=4,8"], "--max-seqs=4: the flags after -- say something of it"),
        ({"prefer": "mixed"}, ["prefer=decode"], "--prefer=decode: the flags after -- say something of it"),
        ({}, ["max-step-tokens=512", f"max-seqs={','.join(map(str, range(1, 65)))}"], "65 combinations"),
    ],
)
def test_grids_of_which_nothing_can_be_measured(
    model_path: Path, given: dict[str, Any], grids: list[str], message: str
) -> None:
    with pytest.raises(GridError, match=message):
        cells_of(space(model_path, **given), [parse_grid(grid) for grid in grids], lambda _: None)


def test_the_choice_is_a_share_of_the_best_that_was_measured() -> None:
    default, chosen = arm("defaults", 0.9, 0.6), arm("A", 0.9, 0.8)
    arms = [default, chosen, arm("G1", 0.9, 0.5, searched=False, in_grid=True)]
    best = compared(chosen, arms)
    assert best is not None
    assert (best.best, best.best_of_grid, best.ratio) == ("A", "G1", 1.0)
    text = comparison_text(best, chosen, arms)
    assert "1.000 of the goodput, measured: A 1.600 req/s; G1 1.000 req/s is the best of the grid" in text

    # What is void is no better, whatever it says.
    void = arm("G3", 0.9, 1.0, searched=False, in_grid=True, void=["the client was late"])
    arms += [arm("G2", 0.1, 0.84, searched=False, in_grid=True), void]
    less = compared(chosen, arms)
    assert less is not None
    assert (less.best, less.best_of_grid) == ("G2", "G2")
    assert less.ratio == pytest.approx(0.8 / 0.84)
    text = comparison_text(less, chosen, arms)
    assert "0.952 of the goodput, measured: A 1.600 req/s, G2 1.680 req/s (--max-seqs=G2)" in text
    assert "may be chance" in text
    clear = arm("G4", 0.1, 1.0, searched=False, in_grid=True)
    clearly = compared(chosen, [*arms, clear])
    assert clearly is not None
    assert "may be chance" not in comparison_text(clearly, chosen, [*arms, clear])


def test_without_a_grid_or_without_anything_in_time_there_is_no_ratio() -> None:
    chosen = arm("defaults", 0.9, 0.8)
    assert compared(chosen, [chosen, arm("A", 0.9, 0.9)]) is None
    nothing = arm("defaults", 0.0, 0.0, in_grid=True)
    assert compared(nothing, [nothing]) == Comparison("defaults", "defaults", None, 0.0, None)
    assert "nothing met the SLO (measured)" in comparison_text(
        Comparison("defaults", "defaults", None, 0.0, None), nothing, [nothing]
    )


def test_of_equals_the_choice_is_the_best() -> None:
    chosen = arm("A", 0.9, 0.8, in_grid=True)
    arms = [arm("defaults", 0.9, 0.8), chosen, arm("G1", 0.9, 0.8, searched=False, in_grid=True)]
    same = compared(chosen, arms)
    assert same is not None
    assert (same.best, same.ratio) == ("A", 1.0)
    alone = compared(chosen, arms[:2])
    assert alone is not None
    assert comparison_text(alone, chosen, arms[:2]).endswith("; it is the best of the grid")


def test_beside_a_choice_that_was_measured_only_what_was_measured_counts() -> None:
    chosen = arm("A", 0.9, 0.5)
    unknown = arm("G1", 0.99, searched=False, in_grid=True)
    assert compared(chosen, [chosen, unknown]) is None
    assert compared(unknown, [unknown, arm("G2", 0.1, 0.4, in_grid=True)]) is None
    arms = [chosen, unknown, arm("G2", 0.9, 0.4, searched=False, in_grid=True)]
    beside = compared(chosen, arms)
    assert beside is not None
    assert (beside.best, beside.best_of_grid) == ("A", "G2")
    line = overview(arms).splitlines()[2]
    assert line.split()[1:] == ["--max-seqs=G1", *["-"] * 6, "99.0%", "-"]
    # A ratio of shares of other numbers of requests has no interval.
    half = arm("G3", 0.9, measured=msgspec.structs.replace(found(0.6), requests=50), searched=False, in_grid=True)
    uneven = compared(chosen, [chosen, half])
    assert uneven is not None
    assert uneven.ratio == pytest.approx(0.5 / 0.6)
    assert (uneven.low, uneven.high) == (None, None)


def test_every_arm_has_a_line() -> None:
    arms = [
        arm("defaults", 0.8, 0.9, in_grid=True),
        arm("G1", 0.7, 0.5, measured=found(0.5, ttft=0.08), searched=False, in_grid=True),
    ]
    _, first, second = overview(arms).splitlines()
    assert first.startswith("defaults (grid): no flags beyond yours")
    assert first.split()[-2:] == ["80.0%", "+0%"]
    assert second.startswith("G1: --max-seqs=G1")
    assert second.split()[-2:] == ["70.0%", "+25%"]  # TTFT of 0.1 s for 0.08 s
    assert "predicted" not in overview([arm("defaults", 0.8)])
