"""The loop of a rank: receive a plan, run it, send the result. Blocking, as there is nothing else to do meanwhile."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner, Step
from ipc.channels import BlockingDealer
from ipc.control import in_a_line
from ipc.engine_messages import RankReport, StepFailed, StepPlan, ToWorker
from ipc.process_usage import UsageMeter
from ipc.sessions import LinkError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # how soon an idle rank notices that it is to end
_RUNNING_SECONDS = 5e-5  # how soon a rank notices that its device is done, where no further plan is there
_REPORT_SECONDS = 1.0
_SENDING_SECONDS = 0.1  # before the process ends, and with it the thread that sends


def run_plans(link: BlockingDealer[ToWorker], runner: Runner, stop: threading.Event, meter: UsageMeter) -> int:
    """Carry out plans until `stop` is set (0), or until a plan, the link or the model can't be trusted (1).

    What `meter` says of this process is sent about once a second.
    """
    last: int | None = None  # the step that was begun last
    running: Step | None = None  # launched and sampled, on a device that tells when it is done
    report_at = time.monotonic() + _REPORT_SECONDS
    try:
        while not stop.is_set():
            if (now := time.monotonic()) >= report_at:
                link.send(RankReport(meter.usage()))
                report_at = now + _REPORT_SECONDS
            plan = link.recv(_POLL_SECONDS if running is None else 0)
            if plan is not None:
                last = plan.step
                with _failing(link):
                    running = _carry_out(runner, plan, running, link)
            elif running is not None and runner.ready(running):
                with _failing(link):
                    _report(runner, running, link)
                running = None
            elif running is not None:
                time.sleep(_RUNNING_SECONDS)
        return 0
    except _StepError as error:
        problem = f"step {last} failed: {error}"
    except PlanError as error:
        problem = f"the scheduler's plan of step {last} is invalid: {error}"
    except (LinkError, msgspec.DecodeError) as error:
        problem = f"the link to the scheduler can't be trusted after step {last}: {error}"
    except Exception as error:
        log.debug("where it failed", exc_info=True)
        problem = f"unexpected error after step {last}: {in_a_line(error)}"
    log.error("%s; this rank ends", problem)
    return 1


class _StepError(Exception):
    """The scheduler knows of it."""


def _carry_out(runner: Runner, plan: StepPlan, running: Step | None, link: BlockingDealer[ToWorker]) -> Step | None:
    """Launch a plan behind the step that is still running, whose result is then sent; the step that runs now."""
    step = runner.launch(plan)
    if running is not None:
        _report(runner, running, link)
    runner.sample(step)
    if runner.overlaps:
        return step
    _report(runner, step, link)
    return None


def _report(runner: Runner, step: Step, link: BlockingDealer[ToWorker]) -> None:
    result = runner.collect(step)
    if result is not None:
        link.send(result)


@contextmanager
def _failing(link: BlockingDealer[ToWorker]) -> Iterator[None]:
    """Whatever goes wrong inside, but for a bad plan, is a failed step: `_StepError`."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        log.debug("where the step failed", exc_info=True)
        # Without it, the scheduler could not tell this from a death that the requests have nothing to do with.
        link.send(StepFailed())
        time.sleep(_SENDING_SECONDS)
        raise _StepError(in_a_line(error)) from error
