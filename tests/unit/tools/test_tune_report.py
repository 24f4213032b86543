"""What the tuner concludes and prints, from made-up arms."""

from typing import Any

import msgspec
import pytest

from tools.tune.confirming import order_of
from tools.tune.figures import Figures, Quantiles
from tools.tune.predicting import Prediction
from tools.tune.report import Ablation, Arm, ablation_text, better, choice_text, error_of, error_text, table
from tools.tune.tuning import different, score


def found(share: float, *, ttft: float | None = 0.1, strain: float | None = 0.5, half: float = 0.02) -> Figures:
    return Figures(
        requests=100,
        answered=100,
        met=round(100 * share),
        share=share,
        share_low=share - half,
        share_high=share + half,
        goodput=2 * share,
        strain=strain,
        ttft=Quantiles(ttft, None if ttft is None else 2 * ttft),
        itl=Quantiles(0.02, 0.04),
        tpot=Quantiles(0.02, 0.03),
    )


def prediction(figures: Figures, rate: float | None = None) -> Prediction:
    return Prediction(
        figures=figures, highest_rate=rate, queue_p90=0.3, busy=0.7, hit_rate=0.0, preemptions=3, refused=0
    )


def arm(name: str, predicted: float, measured: float | None = None, /, **changes: Any) -> Arm:
    parts = {
        "name": name,
        "flags": [] if name == "defaults" else [f"--max-seqs={name}"],
        "predicted": prediction(found(predicted)),
        "measured": None if measured is None else found(measured),
    }
    return Arm(**(parts | changes))


def test_what_was_measured_decides() -> None:
    arms = [arm("defaults", 0.8, 0.9), arm("16", 0.95, 0.85), arm("8", 0.9, 0.97)]
    assert better(arms).name == "8"
    assert better([arm("defaults", 0.8), arm("16", 0.95), arm("8", 0.9)]).name == "16"


def test_a_void_measurement_decides_nothing() -> None:
    void = arm("8", 0.9, 0.97, void=["the client was late"])
    assert better([arm("defaults", 0.8, 0.9), arm("16", 0.95, 0.95), void]).name == "16"
    assert better([arm("16", 0.95, 0.95, void=["the client was late"]), void]).name == "8"


def test_what_was_not_measured_does_not_count_beside_what_was() -> None:
    default, chosen = arm("defaults", 0.99), arm("8", 0.9, 0.5)
    assert better([default, arm("16", 0.98), chosen]) is chosen
    assert choice_text(chosen, default) == "measured: 50.0% of the requests in time, and the defaults were not measured"
    fewer = msgspec.structs.replace(found(0.49), requests=50)  # its second round was not made
    assert "with 100 and 50 requests each that may be chance" in choice_text(
        chosen, arm("defaults", 0.9, measured=fewer)
    )


def test_of_equals_the_least_strained_wins_and_then_the_defaults() -> None:
    calm = arm("8", 0.9, predicted=prediction(found(0.9, strain=0.3)))
    assert better([arm("defaults", 0.9), arm("16", 0.9), calm]).name == "8"
    assert better([arm("defaults", 0.9), arm("16", 0.9)]).name == "defaults"


def test_the_highest_rate_counts_first_where_it_was_asked_for() -> None:
    slow = arm("8", 0.9, predicted=prediction(found(0.99), 2.0))
    fast = arm("16", 0.9, predicted=prediction(found(0.9), 3.0))
    assert better([slow, fast]).name == "16"
    assert score(fast.predicted) > score(slow.predicted)


def test_a_percent_more_in_time_is_no_reason_but_strain_is() -> None:
    assert score(prediction(found(0.951, strain=0.9))) < score(prediction(found(0.949, strain=0.8)))
    assert score(prediction(found(0.93, strain=0.1))) < score(prediction(found(0.95, strain=0.9)))
    assert score(prediction(found(0.5, strain=None))) < score(prediction(found(0.5, strain=9.0)))


def test_errors_are_relative_to_what_was_measured() -> None:
    measured = arm("8", 0.9, 0.6)
    error = error_of(measured, prediction(found(0.9, ttft=0.13)))
    assert error.goodput == pytest.approx(0.5)
    assert error.ttft_p50 == pytest.approx(0.3)
    assert error.itl_p90 == 0
    assert error_of(measured, prediction(found(0.9, ttft=None))).ttft_p50 is None


def test_the_error_is_summed_up_over_arms_and_percentiles() -> None:
    arms = [
        arm("defaults", 0.9, 0.9, predicted=prediction(found(0.9, ttft=0.12))),
        arm("8", 0.9, 0.9, afterwards=prediction(found(0.9, ttft=0.11)), slowdown=1.25),
    ]
    lines = error_text(arms)
    # Errors of 20%, 20%, 0 and 0, and four of 0.
    assert "median 0.0%, largest 20.0%; 2 of 8 beyond 15%" in lines[0]
    assert "median 5.0%, largest 10.0%; 0 of 4 beyond 15%" in lines[1]
    assert "1.25 to 1.25 times" in lines[2]
    assert "calibrate again" in lines[3]
    calm = msgspec.structs.replace(arms[1], slowdown=0.9)
    assert "calibrate again" not in "".join(error_text([arms[0], calm]))


def test_what_the_warm_up_says_has_its_own_errors() -> None:
    arms = [
        arm("defaults", 0.9, 0.9, rescaled=prediction(found(0.9, ttft=0.105))),
        arm("8", 0.9, 0.9, rescaled=prediction(found(0.9, ttft=0.13))),
    ]
    line = error_text(arms)[1]
    assert line.startswith("rescaled by each arm's warm-up")
    # Errors of 5%, 5%, 0 and 0, and of 30%, 30%, 0 and 0.
    assert "median 2.5%, largest 30.0%; 2 of 8 beyond 15%" in line
    rows = [line.split()[-2:] for line in table(arms).splitlines() if "rescaled by the warm-up" in line]
    assert ["+5%", "+30%"] in rows
    assert len(rows) == 8  # share, goodput, and two percentiles of three latencies


def test_chance_is_called_chance() -> None:
    default, chosen = arm("defaults", 0.9, 0.90), arm("8", 0.95, 0.92)
    assert "may be chance" in choice_text(chosen, default)
    clear = arm("8", 0.95, 0.99)
    assert "chance" not in choice_text(clear, default)
    assert "99.0% of the requests in time, with the defaults 90.0%" in choice_text(clear, default)
    assert choice_text(default, default).startswith("keep your flags")
    assert choice_text(arm("8", 0.95), arm("defaults", 0.9)).startswith("predicted: 95.0%")


def test_each_flag_has_a_line_with_what_it_contributes() -> None:
    chosen, default = prediction(found(0.95)), prediction(found(0.6))
    parts = [
        Ablation("--max-seqs=8", prediction(found(0.7))),
        Ablation("--prefer=decode", prediction(found(0.95, strain=0.6))),
        Ablation("--kv-shortage=wait", prediction(found(0.95, strain=0.5))),
        Ablation("--max-itl-ms=60", prediction(found(0.95, strain=None))),
    ]
    lines = ablation_text(chosen, default, parts)
    assert "95.0% in time" in lines[0]
    assert "60.0% in time" in lines[0]
    assert lines[1].endswith("without --max-seqs=8: 70.0% in time, TTFT p90 200.0 ms, ITL p90 40.0 ms")
    assert lines[2].endswith("with it the same requests meet the SLO with more to spare")
    assert lines[3].endswith("the simulator sees no use of it")
    assert lines[4].endswith("with it the same requests meet the SLO with more to spare")
    assert ablation_text(chosen, chosen, []) == []


def test_the_table_has_a_column_for_each_arm_and_says_what_is_not_known() -> None:
    text = table([arm("defaults", 0.8, 0.9), arm("8", 0.95, 0.5, measured=found(0.5, ttft=None))])
    rows = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()[1:] if not line.startswith("  ")}
    assert rows["in time, predicted"] == ["80.0%", "95.0%"]
    assert rows["in time, measured"] == ["90.0%", "50.0%"]
    assert rows["TTFT p50, measured"][1] == "-"
    assert "-11%" in text  # 80% for 90%
    assert "measured" not in table([arm("defaults", 0.8)])


def test_every_round_measures_all_arms_in_an_order_of_its_own() -> None:
    order = order_of(4, 6, seed=3)
    rounds = [tuple(order[start : start + 4]) for start in range(0, 24, 4)]
    assert all(sorted(part) == [0, 1, 2, 3] for part in rounds)
    assert len(set(rounds)) > 1
    assert order == order_of(4, 6, seed=3)


def test_those_to_be_confirmed_differ_in_more_than_a_detail() -> None:
    order = [(1, 2, 0), (1, 2, 1), (0, 0, 1), (1, 0, 1), (2, 1, 2)]
    scores = {point: (5.0 - number,) for number, point in enumerate(order)}
    assert different(order, scores, 3) == [(1, 2, 0), (0, 0, 1), (2, 1, 2)]
    # Where there are no such, details will do, but not what is worth the same.
    assert different(order[:2], scores, 3) == order[:2]
    assert different(order[:2], dict.fromkeys(order, (1.0,)), 3) == order[:1]
