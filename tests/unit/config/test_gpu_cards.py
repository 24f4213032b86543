"""Which GPU `--plan-gpu` means."""

import pytest

from config.gpu_cards import cards, planned_gpu
from config.machine import Machine
from config.resolve import resolve
from config.sources import read_settings
from tests.unit.config.test_plan_memory import SMOLLM2_135M

GIB = 1 << 30


def test_gpus_by_name_and_by_size() -> None:
    assert planned_gpu("h200").capability == "sm_90"
    assert planned_gpu("24GiB").total_bytes == 24 * GIB
    assert planned_gpu(str(24 * GIB)).total_bytes == 24 * GIB
    assert [card.total_bytes for card in cards()] == sorted(card.total_bytes for card in cards())
    for card in cards():
        assert planned_gpu(card.name) == card
        machine = Machine(cores=8, memory_available=GIB, gpus=(card,), plans_elsewhere=True)
        plan = resolve(read_settings(["--model", "m"], {}, "0").config, SMOLLM2_135M, machine).plan
        assert plan.gpu is not None
        assert plan.fits


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("A100-80GB", "A100-80GB", 79),
        ("A100 80GB", "A100-80GB", 79),
        ("a100 40gb", "A100-40GB", 39),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 39),
        ("NVIDIA A100 80GB PCIe", "A100-80GB", 79),
        ("RTX 4090", "RTX4090", 23.5),
        ("rtx-4090", "RTX4090", 23.5),
        ("NVIDIA GeForce RTX 4090", "RTX4090", 23.5),
        ("RTX_3090 24GB", "RTX3090", 23.5),
        ("h100", "H100", 79),
        ("NVIDIA H100 80GB HBM3", "H100", 79),
        ("H100 PCIe", "H100", 79),
        ("nvidia h200", "H200", 139.5),
        ("A10", "A10", 22),
        ("A10 24GB", "A10", 22),
        ("Tesla L4", "L4", 22),
        ("L40S", "L40S", 44),
    ],
)
def test_gpus_as_shops_and_drivers_write_them(text: str, name: str, gib: float) -> None:
    gpu = planned_gpu(text)
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes) == (name, gib * GIB, gib * GIB)


@pytest.mark.parametrize(
    "text",
    # Other cards than those of the list: none of them must be taken for one of it.
    [
        "V100",
        "L40",
        "A100 60GB",
        "A10 40GB",
        "H100 NVL 94GB",
        "RTX 4090 Laptop GPU",
        "RTX4090D",
        "RTX 4060 Ti",
        "0",
        "",
    ],
)
def test_gpus_that_are_not_known(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is neither a memory size such as 24GiB nor one of B200, .*, RTX4"):
        planned_gpu(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100", "'A100' may be any of A100-80GB, A100-40GB: say which"),
        ("nvidia a100-sxm4", "'nvidia a100-sxm4' may be any of A100-80GB, A100-40GB: say which"),
        ("24", "'24' means 24 B, less than any GPU has; write a size with its unit, such as 24GiB"),
        ("4090", "'4090' means 3.99 KiB, less than .*, such as 24GiB, or RTX4090"),
        ("1073741823", "'1073741823' means 1.00 GiB, less than any GPU has; "),
        ("24MiB", "'24MiB' means 24.0 MiB, less than any GPU has; "),
    ],
)
def test_gpus_that_are_not_clear(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        planned_gpu(text)
