"""The scheduler core against a worker that checks every position it reads (see fake_worker)."""

import pytest

from ipc.codec import pack_ints, unpack_ints
from ipc.engine_messages import StepResult, Submit
from scheduler_proc.core import ProtocolError
from scheduler_proc.events import Arrived, StepDone
from scheduler_proc.request import State
from tests.unit.scheduler_proc.engine import GREEDY, PEER, Engine


def scheduled_rows(plan) -> list[tuple[int, ...]]:
    columns = unpack_ints(plan.scheduled)
    return list(zip(columns[::4], columns[1::4], columns[2::4], columns[3::4], strict=True))


def test_one_request_gets_its_tokens_and_leaves_its_blocks() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3, 4, 5], 10, stops=())
    engine.run_to_idle()
    assert len(engine.outputs[1]) == 10
    assert engine.ends[1] == "length"


def test_two_steps_are_in_flight_while_one_request_decodes() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 10, stops=())
    assert [scheduled_rows(plan) for plan in engine.plans] == [[(0, 0, 3, 1)], [(0, 3, 1, 1)]]


def test_no_step_is_planned_past_the_last_allowed_token() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 2, stops=())
    engine.run_to_idle()
    assert [scheduled_rows(plan) for plan in engine.sent] == [[(0, 0, 3, 1)], [(0, 3, 1, 1)]]


def test_long_prompts_are_computed_in_chunks_that_keep_to_the_budget() -> None:
    engine = Engine(max_step_tokens=8, prefill_chunk=6)
    engine.submit(1, list(range(1, 21)), 2, stops=())
    engine.run_to_idle()
    assert [scheduled_rows(plan)[0][1:] for plan in engine.sent] == [
        (0, 6, 0),
        (6, 6, 0),
        (12, 6, 0),
        (18, 2, 1),
        (20, 1, 1),
    ]
    assert engine.worker.max_tokens_seen <= 8


def test_decoding_requests_go_on_while_a_long_prompt_is_computed() -> None:
    engine = Engine(max_step_tokens=8)
    engine.submit(1, [1, 2, 3], 40, stops=())
    engine.step()
    engine.submit(2, list(range(1, 41)), 2, stops=())
    before = len(engine.outputs[1])
    while 2 not in engine.outputs:
        engine.step()
        assert len(engine.outputs[1]) == before + 1, "each step gives the decoding request a token"
        before += 1
    engine.run_to_idle()


def test_the_second_of_two_equal_prompts_is_found_in_the_cache_up_to_one_block() -> None:
    engine = Engine(block_size=4, num_blocks=600, max_step_tokens=512)
    prompt = [1 + i % 40 for i in range(1000)]
    engine.submit(1, prompt, 2, stops=())
    engine.run_to_idle()
    engine.submit(2, prompt, 2, stops=())
    engine.run_to_idle()
    assert engine.cached[1] == 0
    assert engine.cached[2] == 996


def test_a_namespace_hides_the_cache_of_another() -> None:
    engine = Engine()
    prompt = list(range(1, 18))
    engine.submit(1, prompt, 1, namespace="a")
    engine.run_to_idle()
    engine.submit(2, prompt, 1, namespace="b")
    engine.run_to_idle()
    assert engine.cached[2] == 0


def test_without_the_prefix_cache_every_block_is_free_at_idle() -> None:
    engine = Engine(prefix_cache=False)
    for request_id in range(3):
        engine.submit(request_id, list(range(1, 18)), 3, stops=())
    engine.run_to_idle()
    assert engine.core.kv.pool.num_free == engine.core.kv.pool.total


def test_preempted_requests_get_the_same_tokens() -> None:
    """B078: 8 requests of up to 44 tokens in a pool that holds two and a half of them."""
    engine = Engine(num_blocks=28, block_size=4, max_seqs=8)
    for request_id in range(8):
        engine.submit(request_id, [request_id + 1, 2, 3, 4], 40, stops=())
    engine.run_to_idle()
    assert engine.core.planner.num_preemptions > 0
    assert all(len(engine.outputs[request_id]) == 40 for request_id in range(8))


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """B076."""
    engine = Engine(num_blocks=10, block_size=4)
    engine.submit(1, [1] * 30, 20)
    assert engine.failures[1].status == 400
    assert engine.failures[1].param == "max_tokens"
    assert "13 KV blocks" in engine.failures[1].message
    for request_id in range(2, 12):
        engine.submit(request_id, [request_id] * 3, 3)
    engine.run_to_idle()
    assert all(engine.ends[request_id] != "failed" for request_id in range(2, 12))


def test_many_one_token_requests_leak_nothing() -> None:
    """B077: requests that end in their first step, mixed with decoding ones."""
    engine = Engine(max_seqs=4)
    engine.submit(0, [7, 8, 9], 60, stops=())
    for request_id in range(1, 50):
        engine.submit(request_id, [request_id % 40 + 1, 2, 3, 4, 5], 1)
        engine.step()
    engine.run_to_idle()


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_every_chunk_of_a_prompt(steps: int) -> None:
    """B073: nothing comes after the abort, and every block comes back."""
    engine = Engine(max_step_tokens=8, num_blocks=32)
    engine.submit(1, list(range(1, 41)), 5, stops=())
    for _ in range(steps):
        engine.step()
    engine.abort(1)
    engine.run_to_idle()


def test_abort_while_waiting() -> None:
    engine = Engine(max_seqs=1)
    engine.submit(1, [1, 2, 3], 5, stops=())
    engine.submit(2, [1, 2, 3], 5, stops=())
    engine.abort(2)
    engine.run_to_idle()
    assert 2 not in engine.outputs


def test_a_stop_string_found_downstream_ends_the_request() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 50, stops=())
    engine.step()
    engine.step()
    engine.stop(1)
    engine.run_to_idle()
    assert engine.core.counters.finished == 1


def test_min_tokens_counts_outputs_only() -> None:
    """B026: a stop id among the first min_tokens outputs ends nothing (the sampler bans it; here it is let through)."""
    engine = Engine()
    for request_id in range(20):
        engine.submit(request_id, [request_id + 1] * 20, 30, stops=tuple(range(25)), min_tokens=5)
    engine.run_to_idle()
    assert all(len(outputs) > 5 for outputs in engine.outputs.values())


def test_queue_bounds_refuse_with_a_time_to_retry() -> None:
    engine = Engine(max_seqs=1, max_queue_requests=2)
    for request_id in range(5):
        engine.submit(request_id, [1, 2, 3], 3, stops=())
    assert sorted(engine.failures) == [3, 4]
    assert engine.failures[3].status == 429
    assert engine.failures[3].retry_after
    engine.run_to_idle()
    engine = Engine(max_seqs=1, max_queue_tokens=25)
    for request_id in range(4):
        engine.submit(request_id, [1] * 10, 3, stops=())
    assert sorted(engine.failures) == [3]
    engine.run_to_idle()
    assert engine.core.checks.queued_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [([], 5, "prompt"), ([-1], 5, "prompt"), ([50], 5, "prompt"), ([1], 0, "max_tokens"), ([1], 1024, "max_tokens")],
)
def test_bad_submissions_are_refused_by_name(prompt: list[int], max_tokens: int, param: str) -> None:
    engine = Engine()
    engine.submit(1, prompt, max_tokens)
    assert engine.failures[1].status == 400
    assert engine.failures[1].param == param


def test_a_live_request_id_cannot_be_used_twice() -> None:
    engine = Engine()
    engine.submit(1, [1, 2], 5, stops=())
    refusal = engine.core.handle(Arrived(0.0, PEER, Submit(1, pack_ints([1]), 1, 0, b"", GREEDY)))
    assert refusal[0].outputs.rows[0].param == "request_id"


def test_a_lost_peer_takes_its_requests_along() -> None:
    engine = Engine()
    for request_id in range(4):
        engine.submit(request_id, [request_id + 1, 2, 3], 50, stops=())
    engine.step()
    engine.lose_peer()
    engine.run_to_idle()


def test_an_engine_given_up_ends_every_request_once_and_refuses_new_ones() -> None:
    engine = Engine(max_seqs=2)
    for request_id in range(5):
        engine.submit(request_id, [request_id + 1, 2, 3], 50, stops=())
    engine.step()
    engine.lose_engine()
    assert not engine.failures
    engine.fail()
    assert sorted(engine.failures) == [0, 1, 2, 3, 4]
    engine.submit(9, [1], 1)
    assert engine.failures[9].status == 503
    engine.check_idle()


@pytest.mark.parametrize("result", [StepResult(1, b""), StepResult(0, b""), StepResult(0, pack_ints([1, 2]))])
def test_results_that_fit_no_step_are_an_error(result: StepResult) -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 5, stops=())
    with pytest.raises(ProtocolError):
        engine.core.handle(StepDone(1.0, result))


def test_a_sampled_id_outside_the_vocabulary_is_an_error() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 5, stops=())
    with pytest.raises(ProtocolError, match="vocabulary"):
        engine.core.handle(StepDone(1.0, StepResult(0, pack_ints([50]))))


def test_a_short_request_overtakes_long_ones() -> None:
    engine = Engine(max_seqs=40, num_blocks=2000, max_step_tokens=64)
    for request_id in range(32):
        engine.submit(request_id, [request_id + 1] * (5 + request_id), 100, stops=())
    for _ in range(10):
        engine.step()
    engine.submit(99, [1, 2, 3], 4, stops=())
    while 99 not in engine.ends:
        engine.step()
    assert all(len(engine.outputs.get(request_id, ())) < 40 for request_id in range(32))
    engine.run_to_idle()


def test_two_requests_with_one_prompt_fit_where_each_fits_alone() -> None:
    """The later one keeps its own copy of the prompt; it must not hold the first one's too."""
    engine = Engine(num_blocks=13, block_size=4, max_seqs=4, max_step_tokens=64)
    prompt = [i * i % 49 + 1 for i in range(20)]
    engine.submit(0, prompt, 1, stops=())
    engine.submit(1, prompt, 30, stops=())
    engine.run_to_idle()
    assert len(engine.outputs[1]) == 30


def test_a_stuck_request_is_named_as_its_client_names_it() -> None:
    engine = Engine()
    engine.core.handle(Arrived(1.0, PEER, Submit(7, pack_ints([1]), 9, 0, b"", GREEDY, external_id="mine")))
    stats = engine.core.stats(3.5, 0.0)
    assert (stats.stuck_request, stats.oldest_request_seconds) == ("mine", 2.5)


def test_simultaneous_requests_with_one_prompt_compute_it_once() -> None:
    engine = Engine(num_blocks=600, max_seqs=16, max_step_tokens=64)
    prompt = [1 + i * i % 40 for i in range(400)]
    for request_id in range(8):
        engine.submit(request_id, prompt, 3, stops=())
    engine.run_to_idle()
    computed = sum(count for plan in engine.sent for _, _, count, _ in scheduled_rows(plan))
    tails = 8 * (4 + 3)  # each computes its last block and its outputs
    assert computed <= 400 + tails
    assert sum(engine.cached.values()) >= 7 * 396


def test_requests_that_share_a_prefix_compute_it_once_and_their_own_parts_each() -> None:
    engine = Engine(num_blocks=600, max_seqs=16, max_step_tokens=32)
    prefix = [1 + i * i % 40 for i in range(200)]
    for request_id in range(5):
        engine.submit(request_id, prefix + [request_id + 1] * 40, 2, stops=())
    engine.run_to_idle()
    computed = sum(count for plan in engine.sent for _, _, count, _ in scheduled_rows(plan))
    assert computed <= 200 + 5 * (40 + 2)


@pytest.mark.parametrize("shortage", ["wait", "recompute", "swap"])
def test_each_answer_to_a_shortage_gives_every_request_its_tokens(shortage: str) -> None:
    """64 long requests where 10 fit."""
    engine = Engine(
        num_blocks=10 * 20,
        num_host_blocks=400 if shortage == "swap" else 0,
        block_size=4,
        max_seqs=64,
        max_step_tokens=128,
        kv_shortage=shortage,
    )
    for request_id in range(64):
        engine.submit(request_id, [request_id % 40 + 1, request_id // 40, 3, 4] * 5, 60, stops=())
    engine.run_to_idle()
    assert all(len(engine.outputs[request_id]) == 60 for request_id in range(64))
    stats = engine.core.stats(0.0, 0.0)
    assert (stats.preemptions > 0) == (shortage != "wait")
    assert (stats.swapped_in_blocks > 0) == (shortage == "swap")
    if shortage == "swap":
        assert stats.recomputed_tokens <= stats.preemptions * (4 + 1), "only what fills no block"


def test_evicted_prefixes_come_back_from_the_host_tier() -> None:
    engine = Engine(num_blocks=20, num_host_blocks=40, block_size=4, max_step_tokens=64)
    first = [1 + i * i % 40 for i in range(41)]
    engine.submit(1, first, 1, stops=())
    engine.run_to_idle()
    engine.submit(2, [i % 7 + 1 for i in range(60)], 2, stops=())  # takes the whole pool
    engine.run_to_idle()
    engine.submit(3, first, 1, stops=())
    engine.run_to_idle()
    assert engine.cached[3] == 40
    assert engine.core.stats(0.0, 0.0).swapped_in_blocks > 0


def test_long_prompts_leave_half_of_each_step_to_short_ones() -> None:
    engine = Engine(num_blocks=2000, max_step_tokens=64, long_prompt_tokens=100, max_long_prefills=1, max_seqs=16)
    for request_id in range(3):
        engine.submit(request_id, [request_id + 1] * 700, 2, stops=())
    for request_id in range(10, 14):
        engine.submit(request_id, [request_id] * 60, 2, stops=())
    while not all(request_id in engine.ends for request_id in range(10, 14)):
        longs = [request for request in engine.core.planner.prefilling if request.is_long]
        assert len(longs) <= 1
        engine.step()
    assert not any(request_id in engine.ends for request_id in range(3)), "the short ones were not behind the long ones"
    engine.run_to_idle()


def test_prefill_first_holds_decodes_back_and_decode_first_holds_prompts_back() -> None:
    for prefer in ("prefill", "decode"):
        engine = Engine(prefer=prefer, max_step_tokens=8, max_seqs=8)
        engine.submit(1, [1, 2, 3], 12, stops=())
        engine.step()
        engine.submit(2, list(range(1, 31)), 2, stops=())
        engine.run_to_idle()
        for plan in engine.sent:
            counts = [(start, count) for _, start, count, _ in scheduled_rows(plan)]
            prompts = [start for start, count in counts if count > 1 or start == 0]
            assert not prompts or len(prompts) == len(counts), "a step has prompts alone or decodes alone"
        first = {1: None, 2: None}
        for index, plan in enumerate(engine.sent):
            for row, start, _, sample in scheduled_rows(plan):
                if sample and start > 3 and row == 1 and first[2] is None:
                    first[2] = index
                if sample and start == 3 + 10 and row == 0 and first[1] is None:
                    first[1] = index  # its 12th token
        assert first[2] is not None
        assert first[1] is not None
        assert (first[2] < first[1]) == (prefer == "prefill")


def test_an_idle_engine_waits_for_a_batch_to_fill() -> None:
    engine = Engine(batch_wait_ms=100.0, max_seqs=4)
    engine.submit(1, [1, 2], 2, stops=())
    assert not engine.plans
    assert engine.wake_at == pytest.approx(engine.time + 0.1)
    engine.submit(2, [1, 2], 2, stops=())
    engine.step()  # the time is up
    assert {row for row, *_ in scheduled_rows(engine.plans[0])} == {0, 1}
    engine.run_to_idle()
    for request_id in range(10, 14):
        engine.submit(request_id, [request_id] * 2, 2, stops=())
    assert len(scheduled_rows(engine.plans[0])) == 4, "a full batch does not wait"
    engine.run_to_idle()


def test_nobody_joins_a_running_batch_of_the_dynamic_kind() -> None:
    engine = Engine(batching="dynamic", max_seqs=4)
    engine.submit(1, [1, 2], 10, stops=())
    engine.submit(2, [3, 2], 3, stops=())
    engine.run_to_idle()
    assert all(len(scheduled_rows(plan)) == 1 for plan in engine.sent)


@pytest.mark.parametrize("token", [0.001, 0.004], ids=["two blocks", "half a block"])
def test_chunks_shrink_so_that_streams_keep_their_pace(token: float) -> None:
    def seconds(plan) -> float:
        tokens = sum(count for _, _, count, _ in scheduled_rows(plan))
        return 0.02 + token * tokens

    engine = Engine(block_size=16, num_blocks=800, max_step_tokens=512, max_itl_ms=60.0, max_seqs=8, max_model_len=4096)
    engine.seconds = seconds
    for request_id in range(3):
        engine.submit(request_id, [request_id + 1] * 20, 400, stops=())
    for _ in range(60):
        engine.step()
    engine.submit(9, [1 + i * i % 40 for i in range(2000)], 1, stops=())
    gaps = []
    while 9 not in engine.ends:
        before = engine.time
        engine.step()
        gaps.append(engine.time - before)
    assert max(gaps) <= 0.060 * 1.05
    most = (0.060 - 0.020) / token - 3
    assert len(gaps) < 2000 / most * 2.2, "the chunks use at least half of what the limit leaves"
    engine.run_to_idle()


def test_a_request_that_would_be_late_is_refused_at_once() -> None:
    engine = Engine(num_blocks=4000, max_step_tokens=64, max_seqs=4, ttft_target_ms=500.0)
    engine.seconds = lambda plan: 0.01 + 0.001 * sum(count for _, _, count, _ in scheduled_rows(plan))
    for request_id in range(30):  # fewer than a second's work: the model learns
        engine.submit(request_id, [request_id + 1] * 40, 4, stops=())
        engine.run_to_idle()
    for request_id in range(100, 130):
        engine.submit(request_id, [request_id - 90] * 200, 4, stops=())
    assert 5 < len(engine.failures) < 29
    refusal = engine.failures[max(engine.failures)]
    assert (refusal.status, refusal.code) == (429, "ttft_target")
    assert refusal.retry_after >= 1
    engine.run_to_idle()


def test_an_output_that_repeats_itself_ends_if_asked() -> None:
    engine = Engine(num_blocks=200)
    submit = Submit(1, pack_ints([1, 2, 3]), 500, 0, b"", GREEDY, stop_on_loop=4)
    engine.core.handle(Arrived(0.0, PEER, submit))
    ends = []
    for step in range(400):
        commands = engine.core.handle(StepDone(0.0, StepResult(step, pack_ints([7 + step % 3]))))
        ends += [
            row for command in commands if hasattr(command, "outputs") for row in command.outputs.rows if row.finish
        ]
        if ends:
            break
    assert ends[0].loop
    assert ends[0].finish == "stop"
    assert 32 <= step + 1 <= 36


def test_a_long_prompt_gets_its_share_however_many_short_ones_come() -> None:
    engine = Engine(num_blocks=4000, max_step_tokens=32, long_prompt_tokens=100, max_seqs=16, prefix_cache=False)
    engine.submit(1, [1] * 600, 1, stops=())
    number = 10
    steps = 0
    while 1 not in engine.ends:
        for _ in range(3):  # more than a step has room for
            engine.submit(number, [number % 40 + 1] * 20, 1, stops=())
            number += 1
        engine.step()
        steps += 1
        assert steps <= 600 / 16 + 5, "half of each step is kept for it"
    engine.run_to_idle()


def test_admission_by_ttft_counts_the_blocks_that_are_missing() -> None:
    engine = Engine(num_blocks=40, block_size=4, max_step_tokens=64, max_seqs=8, kv_shortage="wait")
    engine.seconds = lambda plan: 0.01
    for request_id in range(30):
        engine.submit(request_id, [request_id + 1] * 8, 40, stops=())
        engine.run_to_idle()
    for request_id in range(100, 110):  # three of them fill the pool, each for 0.4 s
        engine.submit(request_id, [request_id - 90] * 8, 40, stops=())
    engine.submit(200, [1, 2, 3], 40, stops=(), ttft_target_ms=300.0)
    assert engine.failures[200].code == "ttft_target"
    engine.run_to_idle()


def test_a_tenant_that_comes_and_goes_does_not_starve_those_who_wait() -> None:
    engine = Engine(num_blocks=4000, max_step_tokens=64, max_seqs=4, policy="fair", prefix_cache=False)
    for request_id in range(20):
        engine.submit(request_id, [request_id + 1] * 300, 2, stops=(), tenant="A")
        engine.submit(100 + request_id, [request_id + 1] * 300, 2, stops=(), tenant="B")
    number = 1000
    engine.submit(number, [5] * 30, 2, stops=(), tenant="C")
    for _ in range(400):
        last = engine.core.requests.get((PEER, number))
        if last is None or last.state is State.RUNNING:
            number += 1
            engine.submit(number, [5] * 30, 2, stops=(), tenant="C")
        engine.step()
    waited = [request_id for request_id in engine.ends if request_id < 1000]
    assert len(waited) == 40, "12,000 tokens of A and B, and an equal share for C, are 375 steps of 64"
    engine.run_to_idle()
