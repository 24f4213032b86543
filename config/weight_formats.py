"""In which formats a checkpoint keeps the matrices of its model, from the types of its tensors."""

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from config.gguf_file import TensorInfo
from config.quantization import Quantization
from config.safetensors_files import TensorHeader
from config.schema import ModelArch, QuantizationName, WeightFormat, WeightFormats
from config.shards import GROUP, Span, largest, shard

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
_INTEGERS = ("int8", "int4")
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


def as_loaded(arch: ModelArch, quantization: QuantizationName, tp: int = 1) -> WeightFormats:
    """What becomes of `arch.formats` when weights are loaded by backends that multiply integers.

    With "int8" and "int4" float matrices become integers, and so do integers that are merged with others; the embedding
    and the head become int8 with both: their errors go straight into logits. Matrices whose inputs are not whole groups
    stay floats, and so does what each of `tp` ranks has of a matrix whose groups it would split; of the latter, each
    format is taken to have the same share.
    """
    formats = arch.formats
    if quantization == "none":
        return formats
    counts = _elements(arch, tp)
    if quantization == "auto" and not counts.split:
        return formats
    declared = formats.layers or {"bfloat16": 1}
    scale = counts.all / sum(declared.values())
    floats = sum(count for name, count in declared.items() if name not in _INTEGERS) * scale
    split = counts.split / counts.all
    layers: dict[WeightFormat, float] = {}
    for name, count in declared.items():
        is_integer = name in _INTEGERS
        left = split
        if not is_integer and floats:  # integers never are of matrices with inputs beside whole groups
            left = min(1.0, left + counts.odd / floats)
        kept: WeightFormat = "bfloat16" if is_integer else name
        to: WeightFormat = name if is_integer or quantization == "auto" else quantization
        layers[kept] = layers.get(kept, 0) + count * scale * left
        layers[to] = layers.get(to, 0) + count * scale * (1 - left)
    formats = structs.replace(formats, layers={name: round(count) for name, count in layers.items() if round(count)})
    if quantization == "auto":
        return formats
    rounds_table = arch.hidden_size % GROUP == 0
    embedding, head = (
        name if name in _INTEGERS or not rounds_table else "int8" for name in (formats.embedding, formats.head)
    )
    return structs.replace(
        formats,
        embedding=embedding,
        head=head,
        group=GROUP if floats or head != formats.head else formats.group,
        has_minimums=formats.has_minimums or quantization == "int4",
    )


class _Elements(Struct, frozen=True, kw_only=True):
    """Of the layers' matrices, on the rank that has most of them."""

    all: int
    odd: int  # of those whose inputs are not whole groups
    split: int  # of the others, those of whose inputs a rank has not whole groups


def _elements(arch: ModelArch, tp: int) -> _Elements:
    part = largest(arch, tp)
    shards = [shard(arch, rank, tp) for rank in range(tp)]
    hidden, inner = arch.hidden_size, part.mlp.count
    queries, keys = part.heads.count * arch.head_dim, part.kv_heads.count * arch.head_dim
    # Elements, and each rank's inputs: all of them, where outputs are divided.
    matrices = (
        (hidden * (queries + 2 * keys + 2 * inner), [Span(0, hidden)]),
        (hidden * queries, [part.heads.times(arch.head_dim) for part in shards]),
        (hidden * inner, [part.mlp for part in shards]),
    )
    odd = split = 0
    for size, spans in matrices:
        if (spans[-1].start + spans[-1].count) % GROUP:
            odd += size
        elif any(span.start % GROUP or span.count % GROUP for span in spans):
            split += size
    whole = sum(size for size, _ in matrices)
    return _Elements(all=arch.num_layers * whole, odd=arch.num_layers * odd, split=arch.num_layers * split)


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
            if weight_format in _INTEGERS and len(formats_of[_matrix_of(name)]) > 1:
                weight_format = "bfloat16"  # as which integers are held beside others
            layers[weight_format] = layers.get(weight_format, 0) + elements
    table = matrices[embedding][0] if embedding in matrices else "bfloat16"
    return WeightFormats(layers=layers, embedding=table, head=matrices[head][0] if head in matrices else table)
