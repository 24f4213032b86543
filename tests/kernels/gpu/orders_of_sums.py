"""A program: how each of the kernels that may compute a deterministic row adds it up. Prints both ways as JSON.

Where attention is split by segments of keys, another kernel computes it than where it is not. The compiler decides
for each anew in which threads the elements of a product and of a row's sum lie, and so in which order they are added
up. Its decisions are read from what it made (Triton's GPU IR), for the architectures named; that takes no GPU.
"""

import json
import re
import sys
from typing import Any

import torch

from kernels.gpu import launch
from kernels.gpu.launch import compiling
from kernels.gpu.prefill_attention import prefill_attention

_KERNELS = ("_prefill", "_prefill_segment")
_SEQUENCES, _CONTEXT, _HEAD_DIM = 16, 8192, 128


def attend(kv_dtype: torch.dtype, query_len: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool = empty(100, 8, 16, _HEAD_DIM, dtype=kv_dtype)
    scales = empty(100, 8, 16, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    prefill_attention(
        empty(_SEQUENCES * query_len, 32, _HEAD_DIM, dtype=torch.bfloat16),
        pool,
        pool,
        empty(_SEQUENCES, _CONTEXT // 16),
        empty(_SEQUENCES + 1),
        empty(_SEQUENCES),
        max_query_len=query_len,
        scale=0.1,
        k_scales=scales,
        v_scales=scales,
        deterministic=True,
        max_context=_CONTEXT,
    )


def orders(ttgir: str) -> list[str]:
    """Products of matrices and sums of rows, each with the layouts of what it reads and writes."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"((?:tt|ttng)\.\w*(?:dot|mma)\w* .*)$", ttgir, re.MULTILINE)
    # Over axis 0 only integers are added up, where a sequence is looked for.
    found += re.findall(r'"tt.reduce"[^\n]*axis = 1[^}]*}>.*?\}\) : (\([^\n]*)', ttgir, re.DOTALL)
    texts = {re.sub(r"%[\w#]+|loc\(.*", "", each) for each in found}
    return sorted(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), text) for text in texts)


def main() -> None:
    made: list[str] = []

    def keep(asm: dict[str, Any], architecture: str) -> tuple[int, int]:
        made.append(asm["ttgir"])
        return 0, 0

    launch._registers = keep
    found = {}
    for architecture in sys.argv[1:]:
        for kv_dtype in (torch.bfloat16, torch.int8):
            made.clear()
            with compiling(architecture):
                attend(kv_dtype, 512)
                attend(kv_dtype, 1)
            of_kernel = {re.search(r"tt\.func public @(\w+)", text)[1]: orders(text) for text in made}
            found[f"{architecture} {kv_dtype}"] = [of_kernel[kernel] for kernel in _KERNELS]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
