"""A deterministic row has the same bits whichever kernel computes it, as far as that can be told without a GPU.

What the kernels compute is compared under the interpreter (`test_prefill_attention`), whose sums are numpy's.
"""

import json

import pytest

from tests.kernels.gpu.compiling_process import run_compiling


@pytest.mark.parametrize(
    "architectures", [["sm_90"], pytest.param(["sm_80", "sm_86", "sm_100", "gfx942"], marks=pytest.mark.slow)], ids=str
)
def test_attention_adds_up_alike_where_it_is_split(architectures: list[str]) -> None:
    found = json.loads(run_compiling("tests.kernels.gpu.orders_of_sums", *architectures, seconds=500))
    assert len(found) == 2 * len(architectures)
    for case, (whole, split) in found.items():
        assert any(text.startswith(("tt.", "ttng.")) for text in whole), case
        assert whole == split, case
