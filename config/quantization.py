"""What config.json says about quantized safetensors: GPTQ (Frantar et al. 2022) and AWQ (Lin et al. 2023) checkpoints.

Fields as the quantizers write them: github.com/AutoGPTQ/AutoGPTQ, github.com/ModelCloud/GPTQModel (quantize_config),
github.com/casper-hansen/AutoAWQ.
"""

from typing import Any, Literal

from msgspec import Struct

from config.json_fields import Fields

_BITS = {"gptq": (4, 8), "awq": (4,)}
_GROUP = 32  # inputs with one scale in the integer formats of the backends


class Quantization(Struct, frozen=True, kw_only=True):
    """How the linears of a checkpoint are packed. value = (code - zero) * scale."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int | None  # consecutive inputs that share a scale and a zero; None: all
    symmetric: bool = False  # zero is 2^(bits - 1) throughout
    reordered: bool = False  # inputs belong to groups in another order than that in which they lie
    zero_offset: int = 0  # what to add to the zeros as they are stored

    @property
    def keeps_integers(self) -> bool:
        """Whether groups of 32 consecutive inputs share a scale, and 8-bit codes need no minimum."""
        return not self.reordered and (self.bits == 4 or self.symmetric)


def read_quantization(config: dict[str, Any], source: str) -> Quantization | None:
    """From the `quantization_config` of config.json, None if it has none; ValueError names what is not supported."""
    entry = config.get("quantization_config")
    if not entry:
        return None
    source = f"{source}: quantization_config"
    if not isinstance(entry, dict):
        raise ValueError(f"{source} is not an object")
    fields = Fields(source, entry)
    method = _one_of(fields, "quant_method", tuple(_BITS))
    bits = _one_of(fields, "bits", _BITS[method])
    group_size = fields.values.get("group_size")
    if not isinstance(group_size, int) or (group_size != -1 and (group_size < _GROUP or group_size % _GROUP)):
        raise ValueError(f"{source}: group_size {group_size!r} is not supported; supported: multiples of {_GROUP}, -1")
    groups = None if group_size == -1 else group_size
    if method == "awq":
        _one_of(fields, "version", ("gemm",), "gemm")
        _one_of(fields, "zero_point", (True,), True)
        return Quantization(method="awq", bits=bits, group_size=groups)
    # The older name of the same field; some files have it beside the newer one, as "".
    key = "checkpoint_format" if entry.get("checkpoint_format") or not entry.get("format") else "format"
    version = _one_of(fields, key, ("gptq", "gptq_v2"), "gptq")
    _one_of(fields, "is_marlin_format", (False,), False)
    _one_of(fields, "pack_dtype", ("int32",), "int32")
    dynamic = entry.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(name.startswith("-:") for name in dynamic):
        raise ValueError(f"{source}: dynamic is not supported but for modules left out (-:)")
    return Quantization(
        method="gptq",
        bits=bits,
        group_size=groups,
        symmetric=fields.flag("sym"),
        reordered=fields.flag("desc_act"),
        zero_offset=1 if version == "gptq" else 0,
    )


def _one_of(fields: Fields, key: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    value = fields.values.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if not any(value == item and type(value) is type(item) for item in supported):
        names = ", ".join(str(item) for item in supported)
        raise ValueError(f"{fields.source}: {key} {value!r} is not supported; supported: {names}")
    return value
