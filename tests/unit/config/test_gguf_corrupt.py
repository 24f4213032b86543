"""GGUF files made to mislead: refused at once, in one line that names the file, whatever sizes they claim."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.gguf_file import GGUFFile
from tests.unit.config.test_gguf_file import write_sample

HUGE = [1 << 24, 1 << 31, 1 << 32, 1 << 61, 1 << 63, (1 << 64) - 1]
STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def header(keys: bytes = b"", tensors: bytes = b"", num_keys: int = 1, num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(
    shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, name: bytes = b"t", dims: int | None = None
) -> bytes:
    count = len(shape) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def one_tensor(**fields: object) -> bytes:
    return header(num_keys=0, num_tensors=1, tensors=tensor(**fields)) + bytes(96)  # type: ignore[arg-type]


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than a header"),
    "short": (b"GGUF" + bytes(19), "shorter than a header"),
    "magic": (b"GGML" + header(num_keys=0)[4:], "first bytes are not 'GGUF'"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not supported"),
    "version_1": (header(version=1, num_keys=0), "GGUF version 1 is not supported"),
    "version_4": (header(version=4, num_keys=0), "GGUF version 4 is not supported"),
    "value_type": (header(key(13, bytes(8))), "metadata value type 13 is unknown"),
    "nested_array": (header(key(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32))), "arrays of metadata type 9"),
    "duplicate_key": (header(key(UINT32, bytes(4)) * 2, num_keys=2), "metadata key 'k' occurs twice"),
    "key_not_utf8": (header(key(UINT32, bytes(4), name=b"\xff")), "is not UTF-8"),
    "long_key": (header(key(UINT32, bytes(4), name=b"k" * 70_000)), "a string of 70000 bytes"),
    "alignment_zero": (header(key(UINT32, bytes(4), name=b"general.alignment")), "general.alignment is 0"),
    "alignment_text": (header(key(STRING, text(b"32"), name=b"general.alignment")), "general.alignment is '32'"),
    "no_dimensions": (one_tensor(shape=()), "tensor 't' has 0 dimensions"),
    "many_dimensions": (one_tensor(shape=(1,) * 5), "tensor 't' has 5 dimensions"),
    "absurd_dimensions": (one_tensor(dims=1 << 31), "tensor 't' has 2147483648 dimensions"),
    "zero_size": (one_tensor(shape=(4, 0)), "the impossible shape"),
    "half_a_block": (one_tensor(shape=(31,), kind=8), "of type Q8_0 has the impossible shape"),
    "tensor_type": (one_tensor(kind=99), "tensor 't' has the unknown type 99"),
    "removed_type": (one_tensor(kind=4), "tensor 't' has the unknown type 4"),
    "misaligned": (one_tensor(offset=4), "is misaligned or reaches past the end"),
    "duplicate_tensor": (header(num_keys=0, num_tensors=2, tensors=tensor() * 2) + bytes(96), "'t' occurs twice"),
}
for size in HUGE:
    for kind in (0, 7, 10, STRING):
        CASES[f"array_{kind}_{size}"] = (header(key(ARRAY, struct.pack("<IQ", kind, size)) + bytes(64)), "an array of")
    CASES[f"string_{size}"] = (header(key(STRING, text(b"x" * 64, size))), f"a string of {size} bytes")
    CASES[f"key_{size}"] = (header(text(b"k" * 64, size)), f"a string of {size} bytes")
    CASES[f"offset_{size}"] = (one_tensor(offset=size & ~31), "reaches past the end")
    CASES[f"shape_{size}"] = (one_tensor(shape=(size, size, size, size)), "reaches past the end")
    CASES[f"tensors_{size}"] = (header(num_keys=0, num_tensors=size), "claims 0 metadata keys|cut off")
    CASES[f"keys_{size}"] = (header(num_keys=size), f"claims {size} metadata keys")
    array = key(ARRAY, struct.pack("<IQ", STRING, 2) + text(b"ab") + struct.pack("<Q", size))
    CASES[f"string_in_array_{size}"] = (header(array + bytes(64)), "does not fit in the file|cut off")


@pytest.mark.parametrize("name", CASES)
def test_a_corrupt_file_is_refused_by_name_without_taking_memory(name: str, tmp_path: Path) -> None:
    data, problem = CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=problem) as caught:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert peak < 1 << 20


def test_an_array_that_would_fit_in_a_huge_file_is_refused_if_no_model_has_such(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    with path.open("wb") as file:
        file.write(header(key(ARRAY, struct.pack("<IQ", STRING, 1 << 25))))
        file.truncate(1 << 29)  # a hole in the file: takes no disk
    with pytest.raises(ValueError, match="an array of 33554432 values is longer than is plausible"):
        GGUFFile(path)


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(one_tensor(name=b"a\nb\x1b[31m", kind=99))
    with pytest.raises(ValueError, match="unknown type") as caught:
        GGUFFile(path)
    assert str(caught.value).isprintable()


def test_an_array_with_a_broken_string_is_refused_when_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(key(ARRAY, struct.pack("<IQ", STRING, 2) + text(b"fine") + text(b"\xc3"))))
    file = GGUFFile(path)
    with pytest.raises(ValueError, match=r"bad\.gguf: is corrupt: a string in an array is not UTF-8"):
        file.metadata["k"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    directory = tmp_path_factory.mktemp("gguf")
    write_sample(directory / "good.gguf")
    return (directory / "good.gguf").read_bytes(), directory / "bad.gguf"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_overwritten_bytes_give_one_line_or_a_header_within_the_file(
    sample: tuple[bytes, Path], draw: st.DataObject
) -> None:
    good, path = sample
    damaged = bytearray(good)
    interesting = st.sampled_from([struct.pack("<Q", value) for value in (0, 1, *HUGE)]) | st.binary(
        min_size=1, max_size=9
    )
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(good) - 1))
        piece = draw.draw(interesting)
        damaged[at : at + len(piece)] = piece
    damaged = damaged[: draw.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))]
    path.write_bytes(damaged)
    problem = ""
    try:
        file = GGUFFile(path)
        metadata = dict(file.metadata)
    except ValueError as error:
        problem = str(error)
    if problem:
        assert problem.startswith(f"{path}: ")
        assert "\n" not in problem
        return
    assert sum(len(value) for value in metadata.values() if isinstance(value, list)) <= len(damaged)
    for info in file.tensors.values():
        assert info.offset + info.num_bytes <= len(damaged)
        assert 0 < info.num_elements <= 8 * info.num_bytes  # no type has less than a bit an element
