"""From a checkpoint's files to a model in a backend's memory: one tensor at a time, of it only this rank's share."""

from collections.abc import Callable
from pathlib import Path

from config.schema import ChildSpec
from gpu_workers.backend import Backend
from gpu_workers.comm import Comm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.gguf import GGUFSource
from gpu_workers.weights.safetensors import SafetensorsSource
from gpu_workers.weights.source import TensorSource, Weights
from ipc.control import StartError


def open_source(path: Path) -> TensorSource:
    """The tensors of a .gguf file or of a directory with safetensors, under their Hugging Face names."""
    try:
        return GGUFSource(path) if path.is_file() else SafetensorsSource(path)
    except (OSError, ValueError) as error:
        raise StartError(f"The weights in {path} cannot be read: {error}") from error


def load_model(
    spec: ChildSpec, backend: Backend, comm: Comm, progress: Callable[[str, float | None], None]
) -> LlamaModel:
    """Load rank `comm.rank`'s share of the model at `spec.model_path`.

    `progress(stage, fraction)` is called as tensors arrive. StartError names the tensors that are missing, unknown or
    of the wrong shape, and the valid values of --tp where the model can't be split that way.
    """
    weights = Weights(open_source(Path(spec.model_path)), lambda fraction: progress("loading weights", fraction))
    return model_class(spec.arch.family)(spec.arch, spec.config.model.max_model_len, weights, backend, comm)
