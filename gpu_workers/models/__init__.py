"""Model definitions by family; one is imported only when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ipc.control import StartError

if TYPE_CHECKING:
    from gpu_workers.models.llama import LlamaModel

# family (`ModelArch.family`) -> module and class
_MODELS = {"llama": ("gpu_workers.models.llama", "LlamaModel")}


def model_class(family: str) -> "type[LlamaModel]":
    """The class that defines `family`; StartError when there is none."""
    if family not in _MODELS:
        raise StartError(f"Model family {family} has no definition here; available: {', '.join(sorted(_MODELS))}.")
    module, name = _MODELS[family]
    return cast("type[LlamaModel]", getattr(import_module(module), name))
