"""The header of a GGUF file: metadata and where each tensor lies. Versions 2 and 3, little-endian.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is untrusted: every count, length and offset is
checked against its size. Arrays (the tokenizer's have 100,000 strings) are skipped at first and decoded when asked for.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

_MAX_STRING = 1 << 24  # bytes; the longest real ones are chat templates of some 10 kB
_MAX_NAME = (1 << 16) - 1  # bytes; the format's limit for keys, and more than it allows tensor names
_MAX_ARRAY = 1 << 24  # values; the longest real ones are vocabularies and merges of some 500,000
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}

# ggml type id -> name, elements in a block, bytes of a block
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
}


class TensorInfo(Struct, frozen=True):
    """One tensor. `shape` is in row-major order as torch has it: GGUF stores the dimensions the other way round."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class _Array(Struct, frozen=True):
    """An array that has not been decoded."""

    type: int
    count: int
    start: int
    end: int


class GGUFFile:
    """Header of the file at `path`; ValueError, naming the file, when it is not a sound GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ValueError(f"{path}: not a GGUF file (shorter than a header)")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self._data)
        self._offset = 0
        try:
            self._read_header()
        except (struct.error, OverflowError):
            self._fail("is cut off or corrupt: its header points past the end of the file")
        except UnicodeDecodeError:
            self._fail("is corrupt: a name in its header is not UTF-8")

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}: {problem}")

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            self._fail("not a GGUF file (its first bytes are not 'GGUF')")
        self._offset = 4
        self.version = self._scalar(4)
        if self.version not in (2, 3):
            self._fail(f"GGUF version {self.version} is not supported (2 and 3 are; big-endian files are not)")
        num_tensors, num_keys = self._scalar(10), self._scalar(10)
        if num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS:
            self._fail(f"claims {num_keys} metadata keys and {num_tensors} tensors, which is more than is plausible")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(_MAX_NAME)
            if key in values:
                self._fail(f"metadata key {key!r} occurs twice")
            values[key] = self._value(self._scalar(4))
        self.metadata = Metadata(self, values)
        self.tensors = self._read_tensors(num_tensors)

    def _scalar(self, kind: int) -> Any:
        codec = _SCALARS.get(kind)
        if codec is None:
            self._fail(f"metadata value type {kind} is unknown")
        (value,) = codec.unpack_from(self._data, self._offset)
        self._offset += codec.size
        return value

    def _string(self, longest: int = _MAX_STRING) -> str:
        length = self._scalar(10)
        if length > min(longest, self._size - self._offset):
            self._fail(f"a string of {length} bytes does not fit in the file, or is longer than is plausible")
        start = self._offset
        self._offset += length
        return self._data[start : self._offset].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip_array()
        return self._scalar(kind)

    def _skip_array(self) -> _Array:
        kind, count = self._scalar(4), self._scalar(10)
        if count > _MAX_ARRAY:
            self._fail(f"an array of {count} values is longer than is plausible")
        start = self._offset
        if kind == _STRING:
            if count > (self._size - start) // 8:
                self._fail(f"an array of {count} strings does not fit in the file")
            data, offset, length_at = self._data, start, struct.Struct("<Q").unpack_from
            for _ in range(count):
                offset += 8 + length_at(data, offset)[0]
            self._offset = offset
        elif kind in _SCALARS:
            self._offset = start + count * _SCALARS[kind].size
        else:
            self._fail(f"arrays of metadata type {kind} are not supported")
        if self._offset > self._size:
            self._fail(f"an array of {count} values does not fit in the file")
        return _Array(kind, count, start, self._offset)

    def decode_array(self, item: _Array) -> list[Any]:
        """The values of an array; its bounds were checked when it was skipped."""
        data = self._data
        if item.type == _STRING:
            texts, offset, length_at = [], item.start, struct.Struct("<Q").unpack_from
            for _ in range(item.count):
                begin = offset + 8
                offset = begin + length_at(data, offset)[0]
                texts.append(data[begin:offset])
            try:
                return [text.decode() for text in texts]
            except UnicodeDecodeError:
                self._fail("is corrupt: a string in an array is not UTF-8")
        code = _SCALARS[item.type].format[1]
        return list(struct.unpack(f"<{item.count}{code}", data[item.start : item.end]))

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            self._fail(f"general.alignment is {alignment!r}, not a power of two from 8")
        headers = []
        for _ in range(count):
            name = self._string(_MAX_NAME)
            dimensions = self._scalar(4)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self._scalar(10) for _ in range(dimensions))[::-1]
            headers.append((name, shape, self._scalar(4), self._scalar(10)))
        base = -(-self._offset // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in headers:
            if name in tensors:
                self._fail(f"tensor {name!r} occurs twice")
            tensors[name] = self._tensor_info(name, shape, kind, base + offset, alignment)
        return tensors

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, offset: int, alignment: int) -> TensorInfo:
        if kind not in TENSOR_TYPES:
            self._fail(f"tensor {name!r} has the unknown type {kind}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if min(shape) < 1 or shape[-1] % block:
            self._fail(f"tensor {name!r} of type {type_name} has the impossible shape {list(shape)}")
        num_bytes = block_bytes * (shape[-1] // block)
        for size in shape[:-1]:
            num_bytes *= size
        if offset % alignment or offset + num_bytes > self._size:
            self._fail(
                f"tensor {name!r} ({num_bytes} bytes at {offset}) is misaligned or reaches past the end of the file"
            )
        return TensorInfo(name, shape, type_name, offset, num_bytes)


class Metadata(Mapping[str, Any]):
    """The key-value pairs; an array is decoded at each access, so keep what you took."""

    def __init__(self, file: GGUFFile, values: dict[str, Any]) -> None:
        self._file = file
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._file.decode_array(value) if isinstance(value, _Array) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
