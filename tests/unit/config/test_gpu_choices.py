"""What `resolve` chooses, refuses and explains where there are GPUs."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.machine import Gpu, Machine
from config.plan_report import full_report
from config.resolve import Resolved, resolve
from config.schema import ModelArch
from config.sources import ConfigError, read_settings
from tests.unit.config.test_resolve_choices import BF16_MACHINE, reason
from tools.model_shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, QWEN_2_5_1_5B, SMOLLM2_135M

GIB = 1 << 30
H200 = Gpu(name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=139 * GIB, capability="sm_90")
MACHINE = Machine(cores=16, memory_available=120 * GIB, gpus=(H200,), gpu_software="torch 2.13.0, triton 3.9.0")


def settle(*argv: str, arch: ModelArch = LLAMA_3_1_8B, machine: Machine = MACHINE) -> Resolved:
    return resolve(read_settings(["--model", "m", *argv], {}, "0").config, arch, machine)


def on(memory: int, **changes: object) -> Machine:
    gpu = msgspec.structs.replace(H200, total_bytes=memory, free_bytes=memory, **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(MACHINE, gpus=(gpu,))


def test_a_gpu_that_can_be_used_is_used() -> None:
    resolved = settle()
    worker, model = resolved.config.worker, resolved.config.model
    assert (worker.device, worker.kernels, worker.deterministic) == ("cuda", "triton", False)
    assert (model.dtype, model.kv_dtype) == ("bfloat16", "bfloat16")
    chosen = reason(resolved, "device")
    assert chosen.startswith("device cuda: NVIDIA H200 (torch 2.13.0, triton 3.9.0); ")
    assert "--device cpu" in chosen, "what to do about kernels that have never run on a GPU"
    assert "--deterministic" in reason(resolved, "deterministic off")
    asked = settle("--device", "cuda", "--deterministic")
    assert asked.config.worker.deterministic is True
    assert not any(text.startswith(("device", "deterministic")) for text in asked.reasons)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (Machine(cores=4, memory_available=60 * GIB), "no GPU was found"),
        (Machine(cores=4, memory_available=60 * GIB, gpu_problem="the driver is too old"), "the driver is too old"),
        (msgspec.structs.replace(MACHINE, triton_problem="it is not installed"), "triton, .*: it is not installed"),
        (on(16 * GIB, capability="sm_75"), "NVIDIA H200 has compute capability sm_75, but sm_80 .* is needed"),
        (on(16 * GIB, capability="gfx906"), "NVIDIA H200 has compute capability gfx906, but sm_80"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error_only_where_it_was_asked_for(machine: Machine, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--device cuda: .*{why}.*; --device cpu runs the model on the CPU"):
        settle("--device", "cuda", machine=machine)
    resolved = settle(machine=machine, arch=SMOLLM2_135M)
    assert resolved.config.worker.device == "cpu"
    assert resolved.plan.gpu is None
    assert re.search(why, reason(resolved, "device cpu"))


@pytest.mark.parametrize("capability", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_newer_gpus_are_used(capability: str) -> None:
    assert settle(machine=on(80 * GIB, capability=capability)).config.worker.device == "cuda"


def test_a_cpu_can_be_asked_for_beside_a_gpu() -> None:
    resolved = settle("--device", "cpu", arch=SMOLLM2_135M)
    assert (resolved.config.worker.device, resolved.plan.gpu) == ("cpu", None)
    assert (resolved.config.worker.cuda_graphs, resolved.config.worker.max_graph_seqs) == (False, 0)
    by_kernels = settle("--kernels", "torch", arch=SMOLLM2_135M)
    assert by_kernels.config.worker.device == "cpu"
    assert reason(by_kernels, "device cpu") == "device cpu: --kernels torch is for CPUs"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--device cuda --kernels native", "--device cuda: --kernels native is for CPUs"),
        ("--device cuda --kernels torch", "--device cuda: --kernels torch is for CPUs"),
        ("--tp 2", "--tp 2: on GPUs this version runs one rank only; use --tp 1, or --device cpu"),
        ("--dtype float32", "--dtype float32: GPU kernels compute in bfloat16 or float16"),
        ("--kv-dtype float32", "--kv-dtype float32: GPU kernels keep keys and values in .*, bfloat16, or as fp8 or"),
        ("--dtype float16 --kv-dtype bfloat16", "--kv-dtype bfloat16: GPU kernels keep .* compute in, float16, or"),
        ("--pin-threads", "--pin-threads: only threads of compiled CPU kernels"),
        ("--no-cuda-graphs --max-graph-seqs 8", "--max-graph-seqs 8: does not go with --no-cuda-graphs"),
        ("--cuda-graphs --max-graph-seqs 0", "--max-graph-seqs 0: does not go with --cuda-graphs"),
        ("--kv-memory 1MiB", "--kv-memory 1MiB: must hold one block of 16 tokens, which takes 2.00 MiB"),
        ("--kv-memory 1GiB --max-model-len 9000", "--max-model-len 9000: .* --kv-memory 1GiB holds 8192 tokens"),
        ("--device cpu --cuda-graphs", "--cuda-graphs: there are CUDA graphs with --device cuda only"),
        ("--device cpu --max-graph-seqs 1", "--max-graph-seqs 1: there are CUDA graphs with --device cuda only"),
        ("--device cpu --kv-dtype fp8", "--kv-dtype fp8: only GPU kernels have it; on a CPU int8 takes as little"),
        ("--device cpu --kernels native --kv-dtype fp8", "--kv-dtype fp8: only GPU kernels have it"),
    ],
)
def test_what_contradicts_the_device_is_refused(argv: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        settle(*argv.split())


def test_triton_on_a_cpu_is_interpreted_and_plans_the_gpus_tensors() -> None:
    resolved = settle("--device", "cpu", "--kernels", "triton", arch=SMOLLM2_135M)
    assert "very slow" in reason(resolved, "kernels triton")
    assert (resolved.config.model.dtype, resolved.config.model.kv_dtype) == ("float32", "float32")
    assert resolved.config.worker.deterministic is True
    assert resolved.plan.gpu is None
    assert resolved.plan.weights == 4 * 134_515_008
    assert dict(resolved.plan.buffers)["logits"] > 2 * 64 * 49_152 * 4
    assert resolved.plan.kv <= 4 * GIB  # as on any CPU
    halves = settle("--device", "cpu", "--kernels", "triton", "--dtype", "bfloat16", arch=SMOLLM2_135M)
    assert halves.plan.kv_bytes_per_token == 23_040
    eighths = settle("--device", "cpu", "--kernels", "triton", "--kv-dtype", "fp8", arch=SMOLLM2_135M)
    assert eighths.plan.kv_bytes_per_token == 2 * 30 * 3 * 68
    machine = msgspec.structs.replace(BF16_MACHINE, triton_problem="it is not installed")
    with pytest.raises(ConfigError, match=r"^--kernels triton: needs the package triton, .*: it is not installed"):
        settle("--kernels", "triton", machine=machine)


def test_the_kv_cache_has_all_that_is_left_of_the_share() -> None:
    for share in ("0.5", "0.9"):
        resolved = settle("--gpu-memory-share", share)
        plan = resolved.plan
        assert plan.gpu is not None
        assert plan.gpu.usable == int(float(share) * 140 * GIB)
        assert 0 <= plan.gpu.usable - plan.gpu_total < plan.block_bytes
        assert "what is left" in reason(resolved, "kv_memory")
    busy = msgspec.structs.replace(MACHINE, gpus=(msgspec.structs.replace(H200, free_bytes=60 * GIB),))
    plan = settle(machine=busy).plan
    assert plan.gpu is not None
    assert plan.gpu.usable == 60 * GIB
    assert plan.fits


def test_kv_memory_that_was_asked_for_is_had() -> None:
    plan = settle("--kv-memory", "8GiB").plan
    assert (plan.kv, plan.kv_tokens) == (8 * GIB, 65_536)
    assert settle("--kv-memory", "8GiB", "--kv-dtype", "fp8").plan.kv_tokens == 8 * GIB // (16 * 67_584) * 16


def test_the_machines_memory_is_planned_apart() -> None:
    plan, swapping = settle().plan, settle("--kv-shortage", "swap", "--kv-memory", "8GiB").plan
    assert plan.total < 3 * GIB
    assert swapping.host_kv == 8 * GIB
    assert swapping.total == plan.total + 8 * GIB
    small = msgspec.structs.replace(MACHINE, memory_available=1 * GIB)
    lacking = settle(machine=small).plan
    assert (lacking.fits_gpu, lacking.fits_host, lacking.fits) == (True, False, False)
    # Of the machine that a planned GPU will be in nothing is known.
    assert settle(machine=msgspec.structs.replace(small, plans_elsewhere=True)).plan.fits


@pytest.mark.parametrize(
    ("memory", "arch", "tokens"),
    [
        (140, LLAMA_3_1_8B, 8192),
        (80, LLAMA_3_1_8B, 8192),
        (40, LLAMA_3_1_8B, 4096),
        (24, LLAMA_3_1_8B, 2048),
        (19, LLAMA_3_1_8B, 1024),  # the weights leave 2.1 GiB
        (24, SMOLLM2_135M, 2048),
    ],
)
def test_longer_steps_on_larger_gpus(memory: int, arch: ModelArch, tokens: int) -> None:
    resolved = settle(arch=arch, machine=on(memory * GIB))
    scheduler = resolved.config.scheduler
    assert (scheduler.max_step_tokens, scheduler.prefill_chunk, scheduler.max_seqs) == (tokens, tokens, 256)
    assert reason(resolved, f"max_step_tokens {tokens}")


def test_as_many_requests_as_a_step_holds() -> None:
    assert settle("--max-step-tokens", "100").config.scheduler.max_seqs == 100
    assert settle("--max-step-tokens", "100", "--device", "cpu", arch=SMOLLM2_135M).config.scheduler.max_seqs == 64
    assert settle("--max-seqs", "4000", machine=on(24 * GIB)).config.scheduler.max_step_tokens == 4000


@pytest.mark.parametrize(
    ("argv", "largest"),
    [
        ("", 256),
        ("--max-seqs 64", 64),
        ("--max-seqs 1000", 256),
        ("--max-seqs 1000 --max-graph-seqs 512", 512),
        ("--max-seqs 16 --max-graph-seqs 512", 16),
        ("--cuda-graphs", 256),
        ("--no-cuda-graphs", 0),
        ("--max-graph-seqs 0", 0),
    ],
)
def test_which_batches_have_graphs(argv: str, largest: int) -> None:
    resolved = settle(*argv.split())
    worker = resolved.config.worker
    assert (worker.max_graph_seqs, worker.cuda_graphs) == (largest, largest > 0)
    assert resolved.plan.gpu is not None
    assert (resolved.plan.gpu.graphs > 0) == (largest > 0)


def test_cores_load_weights() -> None:
    assert settle().config.worker.threads == 8
    assert settle("--threads", "3").config.worker.threads == 3
    assert settle(machine=msgspec.structs.replace(MACHINE, cores=2)).config.worker.threads == 2


def test_a_length_that_was_not_asked_for_is_what_fits() -> None:
    small = settle(machine=on(19 * GIB))
    length = small.config.model.max_model_len
    assert small.plan.fits
    assert length is not None
    assert 512 <= length < 131_072
    assert "the model declares 131072)" in reason(small, f"max_model_len {length}")
    # A longer one does not.
    longer = settle("--max-model-len", str(length + 16), machine=on(19 * GIB))
    assert not longer.plan.fits


@given(
    memory=st.integers(GIB // 2, 200 * GIB),
    free=st.floats(0, 1),
    arch=st.sampled_from([SMOLLM2_135M, LLAMA_3_2_1B, QWEN_2_5_1_5B, LLAMA_3_1_8B]),
    max_seqs=st.none() | st.integers(1, 4096),
    step=st.none() | st.integers(256, 16_384),
    block_size=st.integers(1, 256),
    length=st.none() | st.integers(16, 8192),
    kv_dtype=st.sampled_from(["auto", "int8", "fp8"]),
    share=st.floats(0.05, 1),
    graphs=st.sampled_from([[], ["--no-cuda-graphs"], ["--max-graph-seqs", "100"]]),
    shortage=st.sampled_from(["wait", "recompute", "swap"]),
)
def test_whatever_is_resolved_is_complete_and_consistent(
    memory: int,
    free: float,
    arch: ModelArch,
    max_seqs: int | None,
    step: int | None,
    block_size: int,
    length: int | None,
    kv_dtype: str,
    share: float,
    graphs: list[str],
    shortage: str,
) -> None:
    gpu = msgspec.structs.replace(H200, total_bytes=memory, free_bytes=int(free * memory))
    machine = msgspec.structs.replace(MACHINE, gpus=(gpu,))
    argv = ["--model", "m", "--block-size", str(block_size), "--kv-dtype", kv_dtype, "--gpu-memory-share", str(share)]
    argv += [*graphs, "--kv-shortage", shortage]
    for flag, value in (("--max-seqs", max_seqs), ("--max-step-tokens", step), ("--max-model-len", length)):
        argv += [] if value is None else [flag, str(value)]
    asked = read_settings(argv, {}, "0").config
    if max_seqs is not None and step is not None and max_seqs > step:
        return
    resolved = resolve(asked, arch, machine)
    config, plan = resolved.config, resolved.plan
    assert plan.gpu is not None
    assert config.scheduler.max_seqs is not None
    assert config.scheduler.max_step_tokens is not None
    assert config.scheduler.max_seqs <= config.scheduler.max_step_tokens
    assert config.model.max_model_len is not None
    assert min(length or 512, arch.max_position) <= config.model.max_model_len <= plan.kv_tokens
    assert plan.gpu.usable <= min(gpu.free_bytes, share * memory)
    assert plan.fits_gpu == (plan.gpu_total <= plan.gpu.usable)
    # All that may be used is used, or what is needed at least is too much.
    if plan.fits_gpu:
        assert plan.gpu.usable - plan.gpu_total < plan.block_bytes
    else:
        assert plan.kv == plan.bytes_of(length or min(512, arch.max_position))
    # Resolving what is resolved changes nothing.
    again = resolve(config, arch, machine)
    assert again.config == config
    assert again.plan == plan


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_planned_gpu_is_not_dropped_for_a_cpu(kernels: str) -> None:
    elsewhere = msgspec.structs.replace(MACHINE, plans_elsewhere=True)
    with pytest.raises(ConfigError, match=f"^--plan-gpu: --kernels {kernels} is for CPUs$"):
        settle("--kernels", kernels, machine=elsewhere)
    with pytest.raises(ConfigError, match=r"^--plan-gpu: this model's heads have 40 dimensions"):
        settle(arch=msgspec.structs.replace(SMOLLM2_135M, head_dim=40), machine=elsewhere)


def test_the_page_resolves_each_size_of_gpu_for_itself() -> None:
    sizes = (8, 16, 24, 40, 80, 141)
    for argv in ([], ["--max-model-len", "4096"], ["--max-seqs", "3000"], ["--gpu-memory-share", "0.5"]):
        asked = read_settings(["--model", "m", *argv], {}, "0").config
        for here in (24, 140):  # what was chosen for one of them does not show in the others
            text = full_report(asked, LLAMA_3_1_8B, on(here * GIB), settle(*argv, machine=on(here * GIB)))
            rows = text.partition("on GPUs of other sizes")[2].splitlines()[2:]
            assert len(rows) == len(sizes)
            for size, row in zip(sizes, rows, strict=True):
                resolved = settle(*argv, machine=on(size * GIB))
                scheduler, model = resolved.config.scheduler, resolved.config.model
                lengths = (resolved.plan.kv_tokens, model.max_model_len, scheduler.max_step_tokens)
                fitting = [f"{length:,}" for length in lengths] if resolved.plan.fits_gpu else ["does", "not", "fit"]
                assert row.split()[2:] == fitting
    # A setting that a smaller GPU does not take is told in its row.
    asked = read_settings(["--model", "m", "--prefill-chunk", "4096"], {}, "0").config
    text = full_report(asked, LLAMA_3_1_8B, MACHINE, settle("--prefill-chunk", "4096"))
    assert "24.0 GiB  --prefill-chunk 4096: must not be more than --max-step-tokens, which is 2048" in text


def test_more_requests_than_the_kv_cache_has_blocks_never_run_at_once() -> None:
    argv = ["--kv-memory", "32MiB", "--max-model-len", "64"]
    for seqs, blocks, said in (
        (17, 16, "at once: never, since each needs a block and the KV cache has 16; lower --max-seqs, or give"),
        (16, 16, "at once: up to 16 tokens each; of 64 each they would take 128 MiB, 96.0 MiB more than"),
    ):
        resolved = settle(*argv, "--max-seqs", str(seqs))
        assert resolved.plan.num_blocks == blocks
        asked = read_settings(["--model", "m", *argv, "--max-seqs", str(seqs)], {}, "0").config
        assert said in full_report(asked, LLAMA_3_1_8B, MACHINE, resolved)


@pytest.mark.parametrize("head_dim", [8, 40, 272])
def test_heads_that_gpu_kernels_do_not_take_are_told_before_anything_is_loaded(head_dim: int) -> None:
    arch = msgspec.structs.replace(SMOLLM2_135M, head_dim=head_dim)
    why = f"heads have {head_dim} dimensions, and GPU kernels take multiples of 16 up to 256"
    with pytest.raises(ConfigError, match=f"--device cuda: .*{why}"):
        settle("--device", "cuda", arch=arch)
    with pytest.raises(ConfigError, match=f"--kernels triton: .*{why}; use --kernels native"):
        settle("--device", "cpu", "--kernels", "triton", arch=arch)
    assert why in reason(settle(arch=arch), "device cpu")
