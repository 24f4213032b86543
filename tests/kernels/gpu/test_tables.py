"""Settings of kernels by shape: which entry is taken, and what tools may look at and replace."""

import pytest

from kernels.gpu import tables
from kernels.gpu.launch import SHARED_MEMORY
from kernels.gpu.tables import choose, entries, entry_index, noting, trying

FOUND = [
    {"when": {"kind": "int8", "m": [1, 8]}, "use": {"BLOCK": 1}},
    {"when": {"m": [4, 16]}, "use": {"BLOCK": 2}},
    {"use": {"BLOCK": 3}},
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "entries", lambda name: {"one": FOUND, "two": FOUND[:2]})
    monkeypatch.setattr(tables, "_choose", tables._choose.__wrapped__)  # keeps nothing


@pytest.mark.parametrize(
    ("kind", "m", "index"),
    [("int8", 1, 0), ("int8", 8, 0), ("int8", 9, 1), ("fp8", 3, 2), ("fp8", 4, 1), ("fp8", 16, 1), ("int8", 17, 2)],
)
def test_the_first_entry_that_holds_is_taken(table: None, kind: str, m: int, index: int) -> None:
    assert entry_index(FOUND, {"kind": kind, "m": m}) == index
    assert choose("one", kind=kind, m=m) == FOUND[index]["use"]


def test_a_shape_without_settings(table: None) -> None:
    assert entry_index(FOUND[:2], {"kind": "fp8", "m": 17}) is None
    with pytest.raises(KeyError, match="two has no settings for"):
        choose("two", kind="fp8", m=17)


def test_settings_are_tried_for_one_kernel_or_for_all(table: None) -> None:
    tried = {"BLOCK": 4}
    with trying(tried, "one"):
        assert choose("one", kind="fp8", m=1) is tried
        assert choose("two", kind="fp8", m=4) == {"BLOCK": 2}
    with trying(tried):
        assert choose("two", kind="fp8", m=4) is tried
    assert choose("one", kind="fp8", m=1) == {"BLOCK": 3}


def test_what_settings_are_chosen_for_is_noted(table: None) -> None:
    with noting() as noted:
        choose("one", kind="fp8", m=1)
        with pytest.raises(KeyError):
            choose("two", kind="fp8", m=17)
        with trying({}):
            choose("two", kind="fp8", m=1)
    choose("one", kind="int8", m=1)
    assert noted == [("one", {"kind": "fp8", "m": 1}), *(("two", {"kind": "fp8", "m": m}) for m in (17, 1))]


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_shipped_tables_have_the_same_kernels_for_all_architectures(name: str) -> None:
    shipped = entries(name)
    assert set(shipped) == set(entries("sm_90"))
    for kernel, found in shipped.items():
        assert "when" not in found[-1], kernel
        assert all(entry["when"] for entry in found[:-1]), kernel


# What `choose` is given that follows from a model's sizes, and from no batch.
OF_THE_MODEL = {"head_dim", "kv_bytes", "n", "k", "group", "bits", "hidden", "width", "heads", "kv_heads", "vocab"}
# Kernels of a deterministic step, but for those that copy ids and those of the sampler, whose sums are of integers.
SUMMING = ("prefill_attention_deterministic", "weight_only_deterministic", "rms_norm", "gated_activation", "embed")


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_what_decides_on_an_order_of_sums_is_not_chosen_by_the_batch(name: str) -> None:
    shipped = entries(name)
    for kernel in SUMMING:
        assert all(set(entry.get("when", {})) <= OF_THE_MODEL for entry in shipped[kernel]), kernel
    for kind in ("float16", "float32", "float8", "blocks"):
        for n in (512, 6144, 150_000):
            shapes = [{"kind": kind, "m": m, "n": n, "k": 4096} for m in (1, 16, 150, 500, 5000)]
            found = [shipped["matmul"][entry_index(shipped["matmul"], shape)]["use"] for shape in shapes]
            # With SPLIT or without, sums of segments are added up in one order (`kernels.gpu.matmul`).
            assert all(use | {"SPLIT": True} == found[0] | {"SPLIT": True} for use in found), (kind, n)
