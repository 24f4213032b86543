"""A short time slice, so that a process which works now and then does not wait for those that compute all the time.

Linux since 6.12 lets each thread say how long a slice it wants (sched_setattr(2), `sched_runtime` of SCHED_OTHER), and
one that wakes up goes before a running one with a longer slice. Else it waits until that one's slice ends: 2.8 ms by
default on large machines, at each of the steps that a token takes between processes. Nobody gets more processor time
by it, and it takes no privilege. Older kernels take the number and do nothing with it.
"""

import ctypes
import os
import platform
import struct
import sys

SECONDS = 1e-4  # the least that the kernel grants

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # size, policy, flags, nice, priority, runtime, deadline, period, two clamps
_NICE, _RUNTIME = 3, 5  # fields of that


def ask_for(seconds: float) -> bool:
    """Set the slice of this thread and of those that it starts from now on; false where the system has none to set."""
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # else it would become 0
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, round(1e9 * seconds), 0, 0, 0, 0)
    return _call(numbers[0], wanted, 0) is not None


def granted() -> float | None:
    """Seconds of this thread's slice; None where the system does not tell."""
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return None
    found = _call(numbers[1], bytes(_ATTRIBUTES.size), _ATTRIBUTES.size, 0)
    return None if found is None else _ATTRIBUTES.unpack(found)[_RUNTIME] / 1e9


def _call(number: int, attributes: bytes, *more: int) -> bytes | None:
    """What the kernel has then written over `attributes` of this thread; None when it refuses, as a filter may."""
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES.size)
    failed = ctypes.CDLL(None).syscall(number, 0, buffer, *more)
    return None if failed else buffer.raw
