"""Tensors from a directory of safetensors files, with those of GPTQ and AWQ linears as the weights they stand for."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from config.json_fields import optional_json
from config.quantization import read_quantization
from config.safetensors_files import safetensors_files
from gpu_workers.weights.packed import PARTS, PackedLinear, packed_shape
from gpu_workers.weights.quantized import QuantizedWeight

_DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsSource:
    """The files are memory-mapped; a tensor is a copy in memory only while its reader holds it."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._files: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file_path in safetensors_files(path):
            try:
                file: Any = safe_open(file_path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file_path}: {error}") from error
            for name in file.keys():  # noqa: SIM118 (safe_open is not iterable)
                if name in shapes:
                    raise ValueError(f"{file_path}: tensor {name} is in another file of this checkpoint too")
                shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        config_path = path / "config.json"
        self._quantization = read_quantization(optional_json(config_path), str(config_path))
        self._linears = {name.removesuffix(".qweight") for name in shapes if name.endswith(".qweight")}
        if self._linears and self._quantization is None:
            raise ValueError(f"tensors are packed (.qweight), but {config_path} has no quantization_config")
        self.shapes = {
            name: shape
            for name, shape in shapes.items()
            if not (name.endswith(PARTS) and name.rpartition(".")[0] in self._linears)
        }
        if self._quantization is not None:
            for linear in self._linears:
                self.shapes[f"{linear}.weight"] = packed_shape(linear, shapes, self._quantization)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype, or in bfloat16 where the checkpoint has packed integers."""
        packed = self._packed(name)
        return self._plain(name, *_DTYPES) if packed is None else packed.dequantize()

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """The integers of a packed linear; None for other tensors and where `PackedLinear.integers` has none."""
        packed = self._packed(name)
        return None if packed is None else packed.integers()

    def _packed(self, name: str) -> PackedLinear | None:
        linear = name.removesuffix(".weight")
        if self._quantization is None or linear not in self._linears or linear == name:
            return None
        g_idx = None
        if f"{linear}.g_idx" in self._files:
            g_idx = self._plain(f"{linear}.g_idx", "I32")
            num_groups = self._files[f"{linear}.scales"].get_slice(f"{linear}.scales").get_shape()[0]
            if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < num_groups:
                raise ValueError(f"tensor {linear}.g_idx has values outside of its {num_groups} groups")
        return PackedLinear(
            quantization=self._quantization,
            qweight=self._plain(f"{linear}.qweight", "I32"),
            qzeros=self._plain(f"{linear}.qzeros", "I32"),
            scales=self._plain(f"{linear}.scales", *_DTYPES),
            g_idx=g_idx,
        )

    def _plain(self, name: str, *dtypes: str) -> torch.Tensor:
        """The tensor as it is in its file; ValueError unless it has one of `dtypes`."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in dtypes:
            raise ValueError(f"tensor {name} has the type {dtype}, which is not supported ({', '.join(dtypes)} are)")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor
