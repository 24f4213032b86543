"""Whether this machine has NVIDIA GPUs, found without any library (set-up asks before anything is installed)."""

import os
from collections.abc import Mapping
from pathlib import Path


def count_gpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """GPUs whose device nodes are here, or that the driver lists; 0 when CUDA_VISIBLE_DEVICES hides them."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return 0
    nodes = [node for node in root.glob("dev/nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()]
    return len(nodes) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
