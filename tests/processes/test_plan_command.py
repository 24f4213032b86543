"""`python -m launch --device cuda --plan` for published models, from their config.json alone, where there is no GPU.

KV is held to 2 x layers x KV heads x head dimension x tokens x bytes, 8-bit numbers with a float32 scale for each key
and value. The pools asked for are exactly so large, and a byte less.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_supervisor_command import run

# What the models' repositories have in their config.json, as far as it is read.
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, **ROPE},
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": LLAMA_3
    | {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 32.0, **ROPE},
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    },
}
# layers, KV heads, head dimension; parameters as the hub counts them in the checkpoints.
SHAPES = {
    "Llama-3.1-8B": (32, 8, 128, 8_030_261_248),
    "Llama-3.2-1B": (16, 8, 64, 1_235_814_400),
    "Qwen2.5-1.5B": (28, 2, 128, 1_543_714_304),
    "Mistral-7B-v0.3": (32, 8, 128, 7_248_023_552),
    "SmolLM2-135M": (30, 3, 64, 134_515_008),
}
BLOCKS = 100


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A directory with nothing but the config.json."""
    folder = tmp_path / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return request.param, folder


def planned(folder: Path, *flags: str) -> str:
    done = run("--model", str(folder), "--device", "cuda", "--plan", "--plan-gpu", "H200", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "block_size"), [("bfloat16", "auto", 16), ("float16", "auto", 1), ("auto", "fp8", 64)]
)
@pytest.mark.parametrize("model", CONFIGS, indirect=True)
def test_the_kv_cache_of_published_models(model: tuple[str, Path], dtype: str, kv_dtype: str, block_size: int) -> None:
    name, folder = model
    layers, kv_heads, head_dim, _ = SHAPES[name]
    of_a_key = 2 * head_dim if kv_dtype == "auto" else head_dim + 4
    tokens = BLOCKS * block_size
    exact = 2 * layers * kv_heads * tokens * of_a_key
    flags = ("--dtype", dtype, "--kv-dtype", kv_dtype, "--block-size", str(block_size), "--max-model-len", "64")
    for memory, blocks in ((exact, BLOCKS), (exact - 1, BLOCKS - 1)):
        text = planned(folder, *flags, "--kv-memory", str(memory))
        assert number(r"\((\d+) blocks of", text) == blocks
        assert number(r"max concurrent tokens ([\d,]+)", text) == blocks * block_size


@pytest.mark.parametrize("model", CONFIGS, indirect=True)
def test_int8_keys_take_what_fp8_ones_do_and_the_rest_of_the_gpu_is_kv(model: tuple[str, Path]) -> None:
    name, folder = model
    layers, kv_heads, head_dim, parameters = SHAPES[name]
    fp8, int8 = (planned(folder, "--kv-dtype", dtype) for dtype in ("fp8", "int8"))
    assert fp8.replace("fp8", "int8") == int8
    tokens = number(r"max concurrent tokens ([\d,]+)", int8)
    gib = 2 * layers * kv_heads * tokens * (head_dim + 4) / (1 << 30)
    # Of 139.5 GiB 0.9 may be used; the rest is weights, and less than 3 GiB of buffers, graphs and CUDA's own.
    left = 0.9 * 139.5 - 2 * parameters / (1 << 30)
    assert left - 3 < gib < left


def test_a_laptop_can_ask_whether_a_model_fits_a_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    asked = ("--model", str(tmp_path), "--plan", "--max-model-len", "32768", "--max-seqs", "64", "--plan-gpu")
    fits = run(*asked, "24GiB")
    assert fits.returncode == 0, fits.stderr
    assert "GPU: a GPU of 24.0 GiB" in fits.stdout
    assert "of 32,768 each they would take 256 GiB" in fits.stdout
    short = run(*asked, "RTX4080")
    assert short.returncode == 1
    assert "GiB short on RTX4080: weights take 15.0 GiB" in short.stderr
    assert "such as RTX4090" in short.stderr
    again = run(*asked, "RTX4090")
    assert again.returncode == 0, again.stderr


def test_what_a_plan_for_a_gpu_lacks_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["SmolLM2-135M"]))
    for flags, status, said in (
        (("--plan-gpu", "H200"), 2, "--plan-gpu: only with --plan"),
        (("--plan", "--plan-gpu", "V100"), 2, "--plan-gpu: 'V100' is neither a memory size such as 24GiB nor one of"),
        (("--plan", "--plan-gpu", "A100"), 2, "--plan-gpu: 'A100' may be any of A100-80GB, A100-40GB: say which"),
        (("--plan", "--plan-gpu", "24"), 2, "--plan-gpu: '24' means 24 B, less than any GPU has; write a size with"),
        (("--plan", "--plan-gpu", "H200", "--device", "cpu"), 2, "--plan-gpu: not with --device cpu"),
        (("--plan", "--plan-gpu", "H200", "--kernels", "torch"), 2, "--plan-gpu: --kernels torch is for CPUs"),
        ((), 1, f"--model {tmp_path}: this directory has no .safetensors file."),
    ):
        done = run("--model", str(tmp_path), *flags)
        assert done.returncode == status
        assert done.stderr.startswith(f"error: {said}")
        assert done.stderr.count("\n") == 1


def test_without_a_gpu_the_error_says_why(model_path: Path) -> None:
    done = run("--model", str(model_path), "--device", "cuda", "--plan")
    assert done.returncode == 2
    *_, error = done.stderr.splitlines()
    assert re.fullmatch(r"error: --device cuda: .+; --device cpu runs the model on the CPU, and --plan .+", error)
