"""In which formats a checkpoint keeps the matrices of its model, from the types of its tensors."""

import math
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from config.gguf_file import TensorInfo
from config.quantization import Quantization
from config.safetensors_files import TensorHeader
from config.schema import QuantizationName, WeightFormat, WeightFormats

_SAFETENSORS: dict[str, WeightFormat] = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF: dict[str, WeightFormat] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q8_0": "int8",
    "Q4_K": "int4",
    **dict.fromkeys(("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"), "bfloat16"),  # dequantized
}
# Linears of one input, which a model holds as one matrix, by their names in GGUF files and elsewhere.
_MERGED = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("ffn_gate", "ffn_up", "gate_proj", "up_proj"), "gate_up"),
}
_ALL_INPUTS = 1 << 30  # as the size of a group: more than any matrix has
_PACKED_PARTS = (".qzeros", ".scales", ".g_idx")  # beside .qweight


def gguf_formats(tensors: Mapping[str, TensorInfo]) -> WeightFormats:
    """Of a GGUF file. Types that are not supported count as float32: loading will refuse them."""
    matrices = {
        name.removesuffix(".weight"): (_GGUF.get(info.type, "float32"), info.num_elements)
        for name, info in tensors.items()
        if len(info.shape) == 2
    }
    types = {info.type for info in tensors.values()}
    has_minimums = not types.isdisjoint({"Q4_1", "Q4_K"}) or "Q4_0" not in types
    return structs.replace(_formats(matrices, "blk.", "token_embd", "output"), has_minimums=has_minimums)


def as_loaded(formats: WeightFormats, quantization: QuantizationName) -> WeightFormats:
    """What `--quantization` makes of a checkpoint: with "int8" and "int4" float matrices become integers.

    The embedding and the head become int8 with both: their errors go straight into logits.
    """
    if quantization not in ("int8", "int4"):
        return formats
    layers: dict[WeightFormat, int] = {}
    for weight_format, count in (formats.layers or {"bfloat16": 1}).items():
        kept = _rounded(weight_format, quantization)
        layers[kept] = layers.get(kept, 0) + count
    return structs.replace(
        formats,
        layers=layers,
        embedding=_rounded(formats.embedding, "int8"),
        head=_rounded(formats.head, "int8"),
        group=32 if layers != formats.layers or formats.head not in ("int8", "int4") else formats.group,
        has_minimums=formats.has_minimums or quantization == "int4",
    )


def _rounded(weight_format: WeightFormat, to: WeightFormat) -> WeightFormat:
    return weight_format if weight_format in ("int8", "int4") else to


def safetensors_formats(
    tensors: Mapping[str, TensorHeader], quantization: Quantization | None
) -> tuple[WeightFormats, int]:
    """(formats, parameters of the model) of a directory of safetensors."""
    matrices: dict[str, tuple[WeightFormat, int]] = {}
    num_parameters = 0
    for name, header in tensors.items():
        module, _, kind = name.rpartition(".")
        if f"{module}.qweight" in tensors and f".{kind}" in _PACKED_PARTS:
            continue
        elements = math.prod(header.shape)
        weight_format = _SAFETENSORS.get(header.dtype, "float32")
        if quantization is not None and kind == "qweight":
            elements *= 32 // quantization.bits
            weight_format = _packed_format(quantization)
        num_parameters += elements
        if len(header.shape) == 2:
            matrices[module] = (weight_format, elements)
    formats = _formats(matrices, "model.layers.", "model.embed_tokens", "lm_head")
    return _with_groups(formats, quantization), num_parameters


def declared_formats(config: dict[str, Any], quantization: Quantization | None) -> WeightFormats:
    """As config.json says, where there are no files to look into."""
    name = config.get("dtype") or config.get("torch_dtype")  # of transformers 5, and before
    floats: WeightFormat = name if name in ("float32", "float16") else "bfloat16"
    layers = floats if quantization is None else _packed_format(quantization)
    return _with_groups(WeightFormats(layers={layers: 1}, embedding=floats, head=floats), quantization)


def _with_groups(formats: WeightFormats, quantization: Quantization | None) -> WeightFormats:
    if quantization is None:
        return formats
    group = quantization.group_size or _ALL_INPUTS
    return structs.replace(formats, group=group, has_minimums=not quantization.symmetric)


def _packed_format(quantization: Quantization) -> WeightFormat:
    if not quantization.keeps_integers:
        return "bfloat16"  # as which they are dequantized
    return "int4" if quantization.bits == 4 else "int8"


def _matrix_of(name: str) -> str:
    """The matrix that the linear `name` becomes part of."""
    module, _, last = name.rpartition(".")
    return f"{module}.{_MERGED.get(last, last)}"


def _formats(
    matrices: Mapping[str, tuple[WeightFormat, int]], layer_prefix: str, embedding: str, head: str
) -> WeightFormats:
    layers: dict[WeightFormat, int] = {}
    formats_of: dict[str, set[WeightFormat]] = {}
    for name, (weight_format, _) in matrices.items():
        formats_of.setdefault(_matrix_of(name), set()).add(weight_format)
    for name, (weight_format, elements) in matrices.items():
        if name.startswith(layer_prefix):
            if weight_format in ("int8", "int4") and len(formats_of[_matrix_of(name)]) > 1:
                weight_format = "bfloat16"  # as which integers are held beside others
            layers[weight_format] = layers.get(weight_format, 0) + elements
    table = matrices[embedding][0] if embedding in matrices else "bfloat16"
    return WeightFormats(layers=layers, embedding=table, head=matrices[head][0] if head in matrices else table)
