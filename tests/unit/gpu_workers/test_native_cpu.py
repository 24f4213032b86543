"""Tiny models whose weights stay integers in the native backend, and what is said where it can't be had."""

import logging
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from config.arch import read_arch
from gpu_workers.backends import make_backend
from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.backends.torch_cpu import TorchCpuBackend
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.source import Weights
from ipc.control import StartError
from kernels.cpu.build import BuildError
from kernels.cpu.library import load
from tests.unit.gpu_workers.tiny import make_batch, save_tiny, whole_logits
from tests.unit.gpu_workers.tiny_gguf import save_gguf

TOKENS = random.Random(0).choices(range(131), k=150)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def native() -> None:
    try:
        load()
    except BuildError as error:
        pytest.skip(f"no native CPU kernels: {error}")


def native_model(
    path: Path,
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    quantized: bool = True,
) -> LlamaModel:
    backend = NativeCpuBackend(dtype, threads, quantized)
    return LlamaModel(read_arch(path), None, Weights(open_source(path), lambda fraction: None), backend, LocalComm())


def save_quantized(path: Path, kind: str, **settings: Any) -> PreTrainedModel:
    """A tiny GGUF file; the model of transformers with the weights that it stands for."""
    oracle = save_tiny(path / "hf", **SIZES, **settings)
    save_gguf(oracle, path / "tiny.gguf", kind)
    oracle_type = gguf.GGMLQuantizationType[kind]
    for parameter in oracle.parameters():
        if parameter.dim() == 2:
            data = gguf.quants.quantize(parameter.detach().numpy(), oracle_type)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(data, oracle_type)).view(parameter.shape)
    return oracle


@torch.no_grad()
def logits_of(oracle: PreTrainedModel) -> torch.Tensor:
    """[150, 131]"""
    logits: torch.Tensor = oracle(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("settings", [{}, {"family": "qwen2", "tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_integer_weights_give_the_logits_of_transformers(
    kind: str, settings: dict[str, Any], native: None, tmp_path: Path
) -> None:
    expected = logits_of(save_quantized(tmp_path, kind, **settings))
    actual = whole_logits(native_model(tmp_path / "tiny.gguf"), TOKENS)
    # Half a step of an activation is 1.5e-5 of the largest of 32 where they are int16, or 4e-3 where int8, and three
    # layers add it up.
    error, step = (actual - expected).abs(), 1 / 32767 if kind == "Q8_0" else 1 / 127
    assert error.max() < 100 * step
    assert error.pow(2).mean().sqrt() < 8 * step * expected.pow(2).mean().sqrt()


def test_integer_weights_are_dequantized_where_that_is_asked_for(native: None, tmp_path: Path) -> None:
    expected = logits_of(save_quantized(tmp_path, "Q8_0"))
    model = native_model(tmp_path / "tiny.gguf", quantized=False)
    error = (whole_logits(model, TOKENS) - expected).abs().max() / expected.abs().max()
    assert 1e-5 < error < 2e-2, "the weights are rounded to bfloat16, not the activations"
    assert isinstance(model.backend, NativeCpuBackend)
    assert not model.backend.takes_quantized


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_plain_types_of_gguf_are_used_as_they_are(kind: str, native: None, tmp_path: Path) -> None:
    expected = logits_of(save_quantized(tmp_path, kind))
    torch.testing.assert_close(whole_logits(native_model(tmp_path / "tiny.gguf"), TOKENS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q8_0"])
def test_threads_chunks_and_company_do_not_change_a_bit(
    kind: str, dtype: torch.dtype, native: None, tmp_path: Path
) -> None:
    save_quantized(tmp_path, kind)
    expected = whole_logits(native_model(tmp_path / "tiny.gguf", 1, dtype), TOKENS)
    for threads in (1, 2, 3):
        rng = random.Random(threads)
        model = native_model(tmp_path / "tiny.gguf", threads, dtype)
        kv = model.allocate_kv(40, 16)
        blocks = rng.sample(range(40), 40)
        tables = [blocks[:10], blocks[10:20], blocks[20:30]]  # the same sequence three times, out of step
        done = [0, 0, 0]
        while min(done) < len(TOKENS):
            parts, owners = [], []
            for index, table in enumerate(tables):
                count = min(rng.choice((0, 1, 1, 3, 17, 60)), len(TOKENS) - done[index])
                if count:
                    parts.append((TOKENS[done[index] : done[index] + count], done[index], table))
                    owners += range(done[index], done[index] + count)
                    done[index] += count
            if parts:
                assert torch.equal(model.forward(make_batch(parts), kv), expected[owners]), (threads, parts)


def test_a_new_pool_is_used_from_the_next_forward_on(native: None, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = native_model(tmp_path)
    first = whole_logits(model, TOKENS[:40])
    assert torch.equal(whole_logits(model, TOKENS[:40]), first)
    kv = model.allocate_kv(4, 16)
    model.forward(make_batch([(TOKENS[:39], 0, [2, 0, 1])]), kv)
    assert torch.equal(model.forward(make_batch([(TOKENS[39:40], 39, [2, 0, 1])]), kv)[0], first[39])


# --- without a compiler ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that has neither a compiler nor compiled kernels."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TOKENMILL_KERNEL_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    yield
    load.cache_clear()


def test_without_a_compiler_torch_is_taken_with_one_warning(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = make_backend("cpu", "float32", 1, True)
    assert isinstance(backend, TorchCpuBackend)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "plain torch operations instead of the CPU kernels" in record.getMessage()
    assert "no C++ compiler" in record.getMessage()


def test_without_a_compiler_native_kernels_are_refused_and_what_to_install_is_said(no_compiler: None) -> None:
    with pytest.raises(StartError, match=r"--kernels native: there is no C\+\+ compiler .*apt-get install g\+\+"):
        make_backend("cpu", "float32", 1, True, "native")


def test_a_compiler_that_does_not_exist_is_named(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++-99")
    with pytest.raises(
        StartError, match=r"--kernels native: CXX names /nowhere/g\+\+-99, but there is no such program"
    ):
        make_backend("cpu", "float32", 1, True, "native")


def test_an_instruction_set_that_does_not_exist_is_refused(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CPU_ISA", "sse9")
    load.cache_clear()
    try:
        with pytest.raises(StartError, match=r"^TOKENMILL_CPU_ISA: 'sse9' is not one of avx512, avx2, portable$"):
            make_backend("cpu", "float32", 1, True)
    finally:
        load.cache_clear()


def test_int8_keys_and_values_are_not_left_out_where_the_kernels_fail(no_compiler: None) -> None:
    with pytest.raises(StartError, match=r"^--kv-dtype int8 needs compiled kernels, .* no C\+\+ compiler"):
        make_backend("cpu", "float32", 1, True, kv_dtype="int8")


def test_threads_that_cannot_be_bound_to_their_cpus_end_the_start(native: None) -> None:
    with pytest.raises(StartError, match=r"^--pin-threads: the system does not let .* bound to the CPUs 0, 100000$"):
        make_backend("cpu", "float32", 2, True, cpus=(0, 100_000))


def test_a_library_that_cannot_be_loaded_is_named(
    no_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cut off.so"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr("kernels.cpu.library.build", lambda progress: broken)
    with pytest.raises(StartError, match=r"cannot be loaded: .*Delete .*cut off\.so, to have them compiled again"):
        make_backend("cpu", "float32", 1, True, "native")


def test_torch_is_taken_without_a_word_where_it_is_asked_for(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(make_backend("cpu", "bfloat16", 1, True, "torch"), TorchCpuBackend)
    assert not caplog.records


def test_native_kernels_are_the_first_choice(native: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(make_backend("cpu", "bfloat16", 1, True), NativeCpuBackend)
    assert not caplog.records
