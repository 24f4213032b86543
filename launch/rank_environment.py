"""Variables of a rank that libraries read once, when they are loaded."""

from collections.abc import Mapping
from pathlib import Path

from config.schema import ChildSpec

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def rank_environment(spec: ChildSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """What is added to `environ`, the launcher's own, for the rank `spec`."""
    worker = spec.config.worker
    added = {}
    if worker.threads:
        added["OMP_NUM_THREADS"] = str(worker.threads)
    if worker.kernels != "triton":
        return added
    on_gpu = worker.device == "cuda"
    added["TRITON_INTERPRET"] = "0" if on_gpu else "1"
    if on_gpu:
        added[_VISIBLE] = _own_gpu(spec.index, environ.get(_VISIBLE, ""))
        folder = _kernel_cache(environ)
        if folder is not None and "TRITON_CACHE_DIR" not in environ:
            added["TRITON_CACHE_DIR"] = str(folder / "triton")
    return added


def _own_gpu(index: int, visible: str) -> str:
    """The one that rank `index` has, by its name among all: an index or a UUID."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


def _kernel_cache(environ: Mapping[str, str]) -> Path | None:
    """Where compiled kernels are kept, as in `kernels.cpu.build`; None without a home folder: Triton has a default."""
    if environ.get("TOKENMILL_KERNEL_CACHE"):
        return Path(environ["TOKENMILL_KERNEL_CACHE"]).absolute()
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    if not shared.is_absolute():
        if not environ.get("HOME"):
            return None
        shared = Path(environ["HOME"]) / ".cache"
    return shared / "tokenmill" / "kernels"
