"""What is read from the processes' reports."""

from dataclasses import astuple

import pytest

from ipc.messages import ClientReport
from ipc.stats_messages import LAG_BOUNDS, ProcessUsage, TokenizerWork
from scheduler_proc.diagnosis.processes import Cpu, Processes


def usage(name: str, cpu: float, looks: int = 0, lag: float = 0.0) -> ProcessUsage:
    return ProcessUsage(name, cpu, (looks, *[0] * len(LAG_BOUNDS)), lag)


def work(prompts: int, seconds: float) -> TokenizerWork:
    return TokenizerWork(
        0, prompts, seconds, 2 * seconds, prompts, 3 * seconds, 1, 4 * seconds, 6 * seconds, 5 * seconds
    )


def test_means_are_over_the_window_and_the_busiest_process_of_a_role_counts() -> None:
    processes = Processes(10.0)
    processes.take(0.0, [usage("tokenizer-0", 1.0)], [work(5, 1.0)], [ClientReport("frontend-0", 2.0, 10, 1.0)])
    processes.take(
        2.0,
        [usage("tokenizer-0", 1.5, 20, 0.4), usage("tokenizer-1", 7.0), usage("worker-0", 3.0)],
        [work(15, 2.0)],
        [ClientReport("frontend-0", 4.0, 30, 2.0, slow=3, backlog=500)],
    )
    processes.take(
        4.0,
        [usage("tokenizer-0", 2.0, 40, 0.8), usage("tokenizer-1", 9.0), usage("worker-0", 7.0)],
        [work(25, 3.0), work(10, 0.0)],
        [ClientReport("frontend-0", 6.0, 50, 3.0)],
    )
    cpu = processes.cpu()
    assert (cpu.tokenizer_cores, cpu.worker_cores, cpu.frontend_cores) == pytest.approx((1.0, 2.0, 1.0))
    assert (cpu.tokenizer_lag, cpu.frontend_lag) == pytest.approx((0.02, 0.05))
    assert (cpu.encode, cpu.encode_wait, cpu.render, cpu.grammar, cpu.child_wait) == pytest.approx(
        tuple(factor * 2.0 / 30 for factor in (1, 2, 3, 4, 5))
    )
    assert cpu.detokenize_cores == pytest.approx(6 * 2.0 / 4)
    assert (cpu.slow_clients, cpu.backlog) == pytest.approx((1.0, 500 / 3))
    assert cpu.front == pytest.approx(10 * 2.0 / 30 + 2 * (0.02 + 0.05))


def test_a_process_that_began_anew_says_nothing_yet() -> None:
    processes = Processes(10.0)
    processes.take(0.0, [usage("scheduler", 9.0)], [])
    processes.take(1.0, [usage("scheduler", 0.5)], [])
    assert processes.cpu() == Cpu()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    processes = Processes(2.0)
    for second, cpu_seconds in enumerate((0.0, 1.0, 1.0, 1.0)):
        processes.take(float(second), [usage("scheduler", cpu_seconds)], [])
    assert processes.cpu().scheduler_cores == 0.0


def test_one_report_is_no_window() -> None:
    processes = Processes(2.0)
    assert processes.cpu() == Cpu()
    processes.take(0.0, [usage("scheduler", 5.0)], [work(1, 1.0)])
    assert astuple(processes.cpu()) == astuple(Cpu())
