"""From a checkpoint's files to a model in a backend's memory: one tensor at a time, of it only this rank's share."""

import logging
from collections.abc import Callable
from pathlib import Path

from config.schema import ChildSpec
from gpu_workers.backend import Backend
from gpu_workers.comm import Comm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.gguf import GGUFSource
from gpu_workers.weights.quantized import GROUP
from gpu_workers.weights.safetensors import SafetensorsSource
from gpu_workers.weights.source import TensorSource, Weights
from ipc.control import StartError

log = logging.getLogger(__name__)


def open_source(path: Path) -> TensorSource:
    """The tensors of a .gguf file or of a directory with safetensors, under their Hugging Face names."""
    try:
        return GGUFSource(path) if path.is_file() else SafetensorsSource(path)
    except (OSError, ValueError) as error:
        raise StartError(f"The weights in {path} cannot be read: {error}") from error


def bits_of(quantization: str, backend: Backend) -> int | None:
    """To how many bits `--quantization` rounds float matrices; StartError where the backend multiplies floats only."""
    bits = {"int8": 8, "int4": 4}.get(quantization)
    if bits is not None and not backend.takes_quantized:
        raise StartError(f"--quantization {quantization} needs compiled kernels, or those of a GPU")
    return bits


def load_model(
    spec: ChildSpec, backend: Backend, comm: Comm, progress: Callable[[str, float | None], None]
) -> LlamaModel:
    """Load rank `comm.rank`'s share of the model at `spec.model_path`.

    `progress(stage, fraction)` is called as tensors arrive. StartError names the tensors that are missing, unknown or
    of the wrong shape, and the valid values of --tp where the model can't be split that way.
    """
    weights = Weights(
        open_source(Path(spec.model_path)),
        lambda fraction: progress("loading weights", fraction),
        bits_of(spec.config.model.quantization, backend),
        spec.config.worker.threads or 1,
    )
    model = model_class(spec.arch.family)(spec.arch, spec.config.model.max_model_len, weights, backend, comm)
    if weights.left_floats:
        log.warning(
            "--quantization %s: %d matrices are left as floats: the inputs that this rank has of them are not whole "
            "groups of %d",
            spec.config.model.quantization,
            len(weights.left_floats),
            GROUP,
        )
    return model
