"""Which GPUs torch can use here, for programs that don't load it: `python -m kernels.gpu.probe` prints a line of JSON.

`devices`: of each its `name`, `total_bytes`, `free_bytes` (this program's own context, some hundred MiB, counts as
used) and `capability` (sm_90 and the like; of AMD's gfx942 and the like). `problem`: why there are none, or "".
`versions`: those of torch and triton that are installed.
"""

import json
import os
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def look() -> dict[str, Any]:
    """The answer; nothing is raised."""
    answer: dict[str, Any] = {"devices": [], "problem": "", "versions": _versions("torch", "triton")}
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        answer["problem"] = f"torch can't be imported: {_in_a_line(error)}"
        return answer
    if torch.version.cuda is None and torch.version.hip is None:
        answer["problem"] = f"torch {torch.__version__} is a build for CPUs; pytorch.org/get-started has others"
        return answer
    try:
        torch.cuda.init()
        answer["devices"] = [_describe(torch, index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        answer["problem"] = _in_a_line(error)
        if _VISIBLE in os.environ:
            answer["problem"] += f" ({_VISIBLE} is {os.environ[_VISIBLE]!r})"
    return answer


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _describe(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError:  # other programs have left no room for a context
        free = 0
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "free_bytes": free,
        "capability": architecture or f"sm_{properties.major}{properties.minor}",
    }


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
    print()
