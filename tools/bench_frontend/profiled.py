"""The frontend under cProfile; what it spent its time on goes to stderr at its end."""

import cProfile
import pstats
import sys

from config.schema import ChildSpec
from frontend.main import main as frontend_main
from ipc.control import Control

_LINES = 45


def main(spec: ChildSpec, control: Control) -> int:
    """As the frontend's `main`."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        return frontend_main(spec, control)
    finally:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(_LINES)
