"""The loop of a rank: receive a plan, run it, send the result. Blocking, as there is nothing else to do meanwhile."""

import logging
import threading
import time

import msgspec

from gpu_workers.rows import PlanError
from gpu_workers.runner import Runner
from ipc.channels import BlockingDealer
from ipc.control import in_a_line
from ipc.engine_messages import StepFailed, StepPlan, ToWorker
from ipc.sessions import LinkError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # how soon an idle rank notices that it is to end
_SENDING_SECONDS = 0.1  # before the process ends, and with it the thread that sends


def run_plans(link: BlockingDealer[ToWorker], runner: Runner, stop: threading.Event) -> int:
    """Carry out plans until `stop` is set (0), or until a plan, the link or the model can't be trusted (1)."""
    last: int | None = None  # the step that was begun last
    try:
        while not stop.is_set():
            plan = link.recv(_POLL_SECONDS)
            if plan is not None:
                last = plan.step
                _carry_out(runner, plan, link)
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


def _carry_out(runner: Runner, plan: StepPlan, link: BlockingDealer[ToWorker]) -> None:
    """Execute a plan and send its result; whatever goes wrong with that is a failed step: `_StepError`."""
    try:
        result = runner.execute(plan)
        if result is not None:
            link.send(result)
    except PlanError:
        raise
    except Exception as error:
        log.debug("where the step failed", exc_info=True)
        # Without it, the scheduler could not tell this from a death that the requests have nothing to do with.
        link.send(StepFailed())
        time.sleep(_SENDING_SECONDS)
        raise _StepError(in_a_line(error)) from error
