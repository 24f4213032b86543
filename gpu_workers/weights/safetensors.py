"""Tensors from a directory of safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from config.arch import safetensors_files

_DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsSource:
    """The files are memory-mapped; a tensor is a copy in memory only while its reader holds it."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        for file_path in safetensors_files(path):
            try:
                file: Any = safe_open(file_path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file_path}: {error}") from error
            for name in file.keys():  # noqa: SIM118 (safe_open is not iterable)
                if name in self.shapes:
                    raise ValueError(f"{file_path}: tensor {name} is in another file of this checkpoint too")
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name} has the type {dtype}, which is not supported ({', '.join(_DTYPES)} are)")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor
