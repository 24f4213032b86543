"""The compiled CPU kernels from Python: packed weights, and an engine that runs a recorded step in one call.

Mirrors `abi.h` field by field. Nothing here checks shapes against each other: `gpu_workers.backends.native_cpu` does.
"""

import ctypes
import enum
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from kernels.cpu.build import CACHE_VARIABLE, BuildError, build

GROUP = 32  # consecutive inputs that share a scale, in quantized weights and activations
GATED_COLUMNS = 32  # gate rows, then as many up rows, and so on, in the weight of a GATED operation


class Kind(enum.IntEnum):
    """How a packed weight is held."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT4 = 2
    INT8 = 3


class Code(enum.IntEnum):
    """Operations of a step; `abi.h` says what each does."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    GATED = 3
    ROPE = 4
    ATTENTION = 5
    LOGITS = 6


FLAG_GELU = 1
FLAG_LOGITS_ROWS = 2


class KvType(enum.IntEnum):
    """How keys and values are kept in the pool."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3


class Codes(enum.IntFlag):
    """Quantized forms of activations; `abi.h` says what each is."""

    NONE = 0
    CODES16 = 1
    CODES8 = 2


# By what their products are with, weights of the kinds that need codes.
CODES_OF = {Kind.INT4: Codes.CODES8, Kind.INT8: Codes.CODES16}


class Op(Structure):
    """TmOp."""

    _fields_ = (
        ("code", c_int32),
        ("flags", c_int32),
        ("input", c_int32),
        ("residual", c_int32),
        ("output", c_int32),
        ("layer", c_int32),
        ("eps", c_float),
        ("first", c_int32),
        ("weight", c_void_p),
        ("window", c_int32),
        ("unused", c_int32),
    )


class BufferShape(Structure):
    """TmBuffer."""

    _fields_ = (("width", c_int64), ("codes", c_int32), ("unused", c_int32))


class AttentionSizes(Structure):
    """TmAttention."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("num_layers", c_int64),
        ("kv_type", c_int32),
        ("unused", c_int32),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv", c_void_p),
    )


class Step(Structure):
    """TmStep."""

    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("rows", c_int64),
        ("table_width", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_rows", c_void_p),
        ("logits_rows", c_void_p),
        ("logits", c_void_p),
        ("best_ids", c_void_p),
    )


class Sampling(Structure):
    """TmSampling."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("logits", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniforms", c_void_p),
        ("ids", c_void_p),
    )


class KnownRows(Structure):
    """TmRows."""

    _fields_ = (
        ("max_seqs", c_int64),
        ("max_model_len", c_int64),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
        ("tokens", c_void_p),
        ("num_tokens", c_void_p),
        ("block_tables", c_void_p),
        ("num_blocks", c_void_p),
        ("in_use", c_void_p),
    )


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tm_engine_new": (c_void_p, [c_int32]),
    "tm_engine_pin": (c_int32, [c_void_p, POINTER(c_int32)]),
    "tm_engine_free": (None, [c_void_p]),
    "tm_kv_block_bytes": (c_int64, [POINTER(AttentionSizes)]),
    "tm_engine_set_attention": (c_int32, [c_void_p, POINTER(AttentionSizes)]),
    "tm_engine_set_buffers": (c_int32, [c_void_p, POINTER(BufferShape), c_int32]),
    "tm_engine_run": (c_int32, [c_void_p, POINTER(Op), c_int32, POINTER(Step)]),
    "tm_engine_sample": (c_int32, [c_void_p, POINTER(Sampling)]),
    "tm_flatten": (c_int64, [POINTER(KnownRows), c_char_p, c_int64, c_int64, POINTER(Step)]),
    "tm_engine_values": (c_void_p, [c_void_p, c_int32, c_int64]),
    "tm_weight_new": (c_void_p, [c_int32, c_int64, c_int64]),
    "tm_weight_free": (None, [c_void_p]),
    "tm_weight_bytes": (c_int64, [c_void_p]),
    "tm_weight_pack_float": (None, [c_void_p, c_void_p]),
    "tm_weight_pack_int4": (None, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "tm_weight_pack_int8": (None, [c_void_p, c_void_p, c_void_p]),
    "tm_weight_set_bias": (c_int32, [c_void_p, c_void_p]),
}


@cache
def load(progress: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The library, compiled if this machine has not done so yet. Raises `kernels.cpu.build.BuildError`."""
    path = build(progress=progress)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"the CPU kernels cannot be loaded: {error}. Delete {path}, to have them compiled again, or set "
            f"{CACHE_VARIABLE} to a folder from which programs may be run"
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _done(status: int) -> None:
    if status < 0:
        raise MemoryError("the CPU kernels could not allocate the memory they need")


def _made(pointer: int | None) -> int:
    if not pointer:
        raise MemoryError("the CPU kernels could not allocate the memory they need")
    return pointer


class PackedWeight:
    """An [N, K] weight in the kernels' own layout; freed with this object."""

    def __init__(self, library: ctypes.CDLL, kind: Kind, n: int, k: int) -> None:
        self._library = library
        self.kind, self.n, self.k = kind, n, k
        self.gated_width = 0  # results of a GATED operation with this weight, where it is made for one
        self.pointer = _made(library.tm_weight_new(kind, n, k))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.tm_weight_free(self.pointer)

    @property
    def codes(self) -> Codes:
        """What form of its inputs its products are with: codes, or none and therefore float32 values."""
        return CODES_OF.get(self.kind, Codes.NONE)

    @property
    def num_bytes(self) -> int:
        return int(self._library.tm_weight_bytes(self.pointer))

    @classmethod
    def from_float(cls, library: ctypes.CDLL, weight: torch.Tensor, kind: Kind) -> "PackedWeight":
        """From [N, K] of any float dtype; `kind` FLOAT32, or BFLOAT16 to which it is rounded."""
        packed = cls(library, kind, *weight.shape)
        source = weight.to(torch.float32).contiguous()
        library.tm_weight_pack_float(packed.pointer, source.data_ptr())
        return packed

    @classmethod
    def from_int4(
        cls, library: ctypes.CDLL, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None
    ) -> "PackedWeight":
        """codes [N, K] uint8 0..15; scales and minimums [N, K / 32], kept as half floats; no minimums: 0."""
        packed = cls(library, Kind.INT4, *codes.shape)
        parts = codes.contiguous(), scales.float().contiguous()
        low = None if minimums is None else minimums.float().contiguous()
        pointers = [part.data_ptr() for part in parts]
        library.tm_weight_pack_int4(packed.pointer, *pointers, None if low is None else low.data_ptr())
        return packed

    @classmethod
    def from_int8(cls, library: ctypes.CDLL, codes: torch.Tensor, scales: torch.Tensor) -> "PackedWeight":
        """codes [N, K] int8; scales [N, K / 32], kept as half floats."""
        packed = cls(library, Kind.INT8, *codes.shape)
        parts = codes.contiguous(), scales.float().contiguous()
        library.tm_weight_pack_int8(packed.pointer, *(part.data_ptr() for part in parts))
        return packed

    def set_bias(self, bias: torch.Tensor) -> None:
        """[N], added to every product."""
        values = bias.float().contiguous()
        _done(self._library.tm_weight_set_bias(self.pointer, values.data_ptr()))


class Engine:
    """A pool of `threads` compute threads, the caller's one of them, and the buffers of a recorded step."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._pointer = _made(library.tm_engine_new(threads))

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.tm_engine_free(self._pointer)

    def pin(self, cpus: Sequence[int]) -> None:
        """Bind each thread to the CPU at its place; the first, which is the caller's, is left alone. OSError."""
        if len(cpus) != self._threads:
            raise ValueError(f"{len(cpus)} CPUs for {self._threads} threads")
        if self._library.tm_engine_pin(self._pointer, (c_int32 * len(cpus))(*cpus)) < 0:
            raise OSError(f"the system does not let compute threads be bound to the CPUs {', '.join(map(str, cpus))}")

    def set_attention(self, sizes: AttentionSizes) -> None:
        """The pool and tables that ROPE and ATTENTION use; the caller keeps them alive."""
        _done(self._library.tm_engine_set_attention(self._pointer, sizes))

    def set_buffers(self, shapes: Sequence[BufferShape]) -> None:
        """What the operations' buffer numbers mean."""
        _done(self._library.tm_engine_set_buffers(self._pointer, (BufferShape * len(shapes))(*shapes), len(shapes)))

    def run(self, ops: "ctypes.Array[Op]", step: Step) -> None:
        """Run all operations; other Python threads go on meanwhile."""
        _done(self._library.tm_engine_run(self._pointer, ops, len(ops), step))

    def sample(self, sampling: Sampling) -> None:
        """Fill in its ids."""
        _done(self._library.tm_engine_sample(self._pointer, sampling))

    def values(self, buffer: int, rows: int, width: int) -> torch.Tensor:
        """The float32 values [rows, width] of a buffer, not copied: good until a run with more rows than before."""
        address = _made(self._library.tm_engine_values(self._pointer, buffer, rows))
        return torch.frombuffer((c_float * (rows * width)).from_address(address), dtype=torch.float32).view(rows, width)


def flatten(library: ctypes.CDLL, rows: KnownRows, scheduled: bytes, capacity: int, step: Step) -> int:
    """The number of tokens that are scheduled, or -1: see `tm_flatten` in `abi.h`."""
    return int(library.tm_flatten(rows, scheduled, len(scheduled) // 16, capacity, step))


def kv_block_bytes(library: ctypes.CDLL, sizes: AttentionSizes) -> int:
    """Bytes of one layer's part of a KV block."""
    return int(library.tm_kv_block_bytes(sizes))
