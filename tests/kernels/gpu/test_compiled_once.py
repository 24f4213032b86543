"""A user's first request doesn't pay for compiling: whatever comes later has been compiled when a rank starts."""

import json
from pathlib import Path

import pytest

from tests.kernels.gpu.compiling_process import run_compiling
from tests.unit.gpu_workers.tiny import save_tiny
from tests.unit.gpu_workers.tiny_packed import pack_model


@pytest.mark.parametrize(
    ("kv_dtype", "mode"), [("bfloat16", "fast"), pytest.param("fp8", "deterministic", marks=pytest.mark.slow)]
)
def test_steps_compile_nothing_that_the_start_has_not(tmp_path: Path, kv_dtype: str, mode: str) -> None:
    """Numbers of tokens, sequences and blocks change from step to step, and with them what addresses divide by."""
    save_tiny(tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)
    if mode == "fast":
        pack_model(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False})
    said = run_compiling("tests.kernels.gpu.compiled_once", str(tmp_path), kv_dtype, mode, seconds=500)
    found = json.loads(said.splitlines()[-1])
    assert len(found["at_start"]) > 10
    assert found["later"] == []
