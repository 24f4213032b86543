"""Entry point of the HTTP frontend."""

import os
from pathlib import Path

import uvloop

from config.schema import ChildSpec
from ipc.control import Control


def main(spec: ChildSpec, control: Control) -> int:
    """Serve HTTP on the inherited socket until drained or the engine is lost."""
    directory = Path(spec.run_dir) / "metrics"
    directory.mkdir(exist_ok=True)
    # prometheus-client decides when it is first imported where it keeps its values, so nothing may import it earlier.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    from .server import serve

    uvloop.run(serve(spec, control))
    return 0
