"""The Triton backend under the interpreter (on a GPU, where there is one) against the plain torch operations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import device_choices
from config.arch import read_arch
from gpu_workers.backend import Backend
from gpu_workers.backends.torch_cpu import TorchCpuBackend
from gpu_workers.backends.triton_gpu import TritonBackend
from gpu_workers.backends.triton_graphs import GraphCompiled, buckets_of
from gpu_workers.backends.triton_inputs import Bucket, GpuBatch
from gpu_workers.comm import LocalComm
from gpu_workers.drawn import Drawn
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.quantized import QuantizedWeight
from gpu_workers.weights.source import Weights
from ipc.codec import pack_ints, unpack_floats, unpack_ints
from ipc.control import StartError
from ipc.engine_messages import NewRow, SamplingSpec, StepResult
from kernels.gpu import attention_tile
from kernels.gpu.pack import PackedIntegers
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE
from tests.unit.gpu_workers.plans import new_row, plan, spec
from tests.unit.gpu_workers.tiny import make_batch, save_tiny
from tests.unit.gpu_workers.tiny_packed import pack_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 3, 23, 84, 62, 6, 43, 38], [27, 18, 28], [100] * 33]
TABLES = [[4, 9], [7], [1, 2, 3]]
SIZES = {"hidden_size": 96, "num_hidden_layers": 2}  # heads of 16 dimensions


def triton_backend(dtype: torch.dtype = torch.float32, deterministic: bool = False, **changes: Any) -> TritonBackend:
    settings: dict[str, Any] = {"quantized": True, "kv_dtype": "float32"} | changes
    return TritonBackend(DEVICE, dtype, deterministic, **settings)


class Exact(TorchCpuBackend):
    """Dequantizes by itself, in float32; what a checkpoint dequantizes is rounded to bfloat16."""

    takes_quantized = True


def load(path: Path, backend: Backend) -> LlamaModel:
    weights = Weights(open_source(path), lambda fraction: None)
    return LlamaModel(read_arch(path), None, weights, backend, LocalComm())


def logits_of(model: LlamaModel) -> torch.Tensor:
    """Of every token of three prompts, the first in two chunks, then of one more token of each."""
    kv = model.allocate_kv(12, 16)
    first, *others = zip(PROMPTS, TABLES, strict=True)
    parts = [(first[0][:7], 0, first[1]), *((prompt, 0, table) for prompt, table in others)]
    found = [model.forward(make_batch(parts), kv).clone()]
    found.append(model.forward(make_batch([(first[0][7:], 7, first[1])]), kv).clone())
    decodes = [([11 + at], len(prompt), table) for at, (prompt, table) in enumerate(zip(PROMPTS, TABLES, strict=True))]
    found.append(model.forward(make_batch([(ids, start, table) for ids, start, table in decodes]), kv).clone())
    return torch.cat(found).cpu()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_in_float32(tmp_path: Path, family: str, deterministic: bool) -> None:
    save_tiny(tmp_path, family, **SIZES)
    expected = logits_of(load(tmp_path, TorchCpuBackend(torch.float32, True)))
    found = logits_of(load(tmp_path, triton_backend(deterministic=deterministic)))
    assert relative(found, expected) < 2e-5


def test_a_sliding_window(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=8, **SIZES)
    expected = logits_of(load(tmp_path, TorchCpuBackend(torch.float32, True)))
    assert relative(logits_of(load(tmp_path, triton_backend())), expected) < 2e-5


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.02), ("fp8", 0.08)])
def test_keys_and_values_in_fewer_bits(tmp_path: Path, kv_dtype: str, bound: float) -> None:
    """Bounds: a few times the rounding of one number, 1/254 and 1/16 of its largest."""
    save_tiny(tmp_path, **SIZES)
    expected = logits_of(load(tmp_path, TorchCpuBackend(torch.float32, True)))
    found = logits_of(load(tmp_path, triton_backend(kv_dtype=kv_dtype)))
    assert 0 < relative(found, expected) < bound


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, id="awq"
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False},
            id="gptq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False},
            id="int8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_integer_weights_stay_integers(tmp_path: Path, config: dict[str, Any]) -> None:
    """Nothing is rounded but their scales, to float16, as they are in the checkpoint."""
    save_tiny(tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    pack_model(tmp_path, config)
    whole = logits_of(load(tmp_path, Exact(torch.float32, True)))
    model = load(tmp_path, triton_backend())
    assert isinstance(model._layers[0].qkv.weight, PackedIntegers)
    assert relative(logits_of(model), whole) < 5e-5


# --- steps -----------------------------------------------------------------------------------------------------------


class Steps:
    """Plans for one runner, one after the other or overlapped."""

    def __init__(self, model: LlamaModel, graphs: tuple[int, ...] = (), max_model_len: int = 64) -> None:
        self.model = model
        self.runner = Runner(model, model.allocate_kv(24, 4), 24, 4, 4, max_model_len, LocalComm())
        if graphs:
            self.runner.capture(graphs, lambda done: None)

    def generate(self, samplings: list[SamplingSpec], count: int) -> tuple[list[list[int]], list[StepResult]]:
        """`count` tokens for each prompt; the second prompt comes while the first is running."""
        prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
        new = [
            new_row(row, ids, range(6 * row, 6 * row + 6), sampling=one)
            for row, (ids, one) in enumerate(zip(prompts, samplings, strict=True))
        ]
        plans = [plan(0, [(0, 0, 5, 0)], new=new[:1]), plan(1, [(0, 5, 2, 1), (1, 0, 3, 1)], new=new[1:])]
        plans += [plan(2 + at, [(0, 7 + at, 1, 1), (1, 3 + at, 1, 1)]) for at in range(count - 1)]
        results = []
        step = None
        for each in plans:
            launched = self.runner.launch(each)
            if step is not None:
                results.append(self.runner.collect(step))
            self.runner.sample(launched)
            step = launched
        results.append(self.runner.collect(step))
        tokens = [unpack_ints(result.token_ids).tolist() for result in results[1:]]
        return [list(column) for column in zip(*tokens, strict=True)], results[1:]


SAMPLINGS = {
    "greedy": [spec(), spec()],
    "drawn": [spec(temperature=1.0, seed=5, top_k=7), spec(temperature=0.7, seed=6, top_p=0.8, min_p=0.01)],
    "penalties": [spec(repetition_penalty=1.8), spec(temperature=1.0, seed=2, frequency_penalty=1.1)],
    "edits": [
        spec(bias={9: 40.0, 3: 40.0}, banned=[9], min_tokens=3),
        spec(allowed_ids=pack_ints([4, 17, 99]), bad_words=(pack_ints([4]),)),
    ],
    "logprobs": [spec(logprobs=3), spec(temperature=1.0, seed=1, logprobs=0)],
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_same_tokens_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, **SIZES)
    expected, on_cpu = Steps(load(tmp_path, TorchCpuBackend(torch.float32, True))).generate(SAMPLINGS[name], 5)
    found, on_device = Steps(load(tmp_path, triton_backend()), graphs=(2,)).generate(SAMPLINGS[name], 5)
    assert found == expected
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one is not None
            assert other is not None
            assert one.chosen == pytest.approx(other.chosen, abs=1e-3)
            assert unpack_ints(one.top_ids) == unpack_ints(other.top_ids)
            np.testing.assert_allclose(unpack_floats(one.top_values), unpack_floats(other.top_values), atol=1e-3)


def test_prompt_scores_and_embeddings_of_a_batch_in_another_order(tmp_path: Path) -> None:
    """Decodes are moved to the front of a batch, and what is read from it by its plan's order is still right."""
    save_tiny(tmp_path, **SIZES)
    found = []
    for backend in (TorchCpuBackend(torch.float32, True), triton_backend()):
        model = load(tmp_path, backend)
        runner = Runner(model, model.allocate_kv(24, 4), 24, 4, 4, 64, LocalComm())
        runner.execute(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], range(6))]))
        scored = new_row(1, [9, 8, 7, 6, 5], range(6, 12), sampling=spec(prompt_logprobs=2))
        pooled = new_row(2, [9, 8, 7, 6], range(12, 18))
        pooled = type(pooled)(
            **{name: getattr(pooled, name) for name in pooled.__struct_fields__} | {"pooling": "mean"}
        )
        found.append(runner.execute(plan(1, [(1, 0, 5, 1), (0, 3, 1, 1), (2, 0, 4, 1)], new=[scored, pooled])))
    expected, result = found
    assert result.token_ids == expected.token_ids
    [ours], [theirs] = result.prompt_scores, expected.prompt_scores
    np.testing.assert_allclose(unpack_floats(ours.chosen), unpack_floats(theirs.chosen), atol=1e-3)
    assert (ours.ranks, ours.top_ids) == (theirs.ranks, theirs.top_ids)
    for one, other in zip(result.embeddings, expected.embeddings, strict=True):
        np.testing.assert_allclose(unpack_floats(one), unpack_floats(other), atol=1e-4)


def test_prompt_scores_that_the_device_still_computes(tmp_path: Path) -> None:
    """More rows than are scored at once, while the scores of the step before are not collected yet."""
    save_tiny(tmp_path, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    prompt = [(7 * at * at + 3) % 131 for at in range(60)]
    found = []
    for backend in (TorchCpuBackend(torch.float32, True), triton_backend()):
        steps = Steps(load(tmp_path, backend))
        new = [new_row(0, prompt, range(15), sampling=spec(prompt_logprobs=3))]
        plans = [plan(0, [(0, 0, 53, 0)], new=new), plan(1, [(0, 53, 7, 1)])]
        if backend.overlaps:
            launched = [steps.runner.launch(each) for each in plans]
            results = [steps.runner.collect(step) for step in launched]
        else:
            results = [steps.runner.execute(each) for each in plans]
        found.append([result.prompt_scores[0] for result in results])
    for theirs, ours in zip(*found, strict=True):
        assert (ours.index, ours.first) == (theirs.index, theirs.first)
        for name in ("chosen", "top_values"):
            expected = unpack_floats(getattr(theirs, name))
            np.testing.assert_allclose(unpack_floats(getattr(ours, name)), expected, atol=1e-4)
        assert (ours.ranks, ours.top_ids) == (theirs.ranks, theirs.top_ids)


def test_prompt_scores_of_nan_are_an_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = load(tmp_path, triton_backend())
    model._norm.fill_(torch.nan)
    runner = Steps(model).runner
    step = runner.launch(plan(0, [(0, 0, 3, 0)], new=[new_row(0, [5] * 9, [0], sampling=spec(prompt_logprobs=0))]))
    with pytest.raises(FloatingPointError, match="not numbers"):
        runner.collect(step)


def test_nan_is_an_error_when_the_tokens_arrive(tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES)
    model = load(tmp_path, triton_backend())
    model._norm.fill_(torch.nan)
    runner = Runner(model, model.allocate_kv(24, 4), 24, 4, 4, 64, LocalComm())
    step = runner.launch(plan(0, [(0, 0, 2, 1)], new=[new_row(0, [1, 2], [0])]))
    with pytest.raises(FloatingPointError, match="not numbers"):
        runner.collect(step)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_graphs_compute_what_the_ops_do(tmp_path: Path, deterministic: bool) -> None:
    """Two sequences in a bucket of three, then other ones: the padding changes nothing, and nothing is left over."""
    save_tiny(tmp_path, **SIZES)
    tokens = []
    for graphs in ((), (1, 3)):
        steps = Steps(load(tmp_path, triton_backend(deterministic=deterministic)), graphs)
        tokens.append([steps.generate(SAMPLINGS["greedy"], 4)[0]])
        freed = [plan(5, freed=[0, 1], new=[new_row(2, [44, 45], [18])])]
        steps.runner.execute(freed[0])
        for step, (start, count) in enumerate([(0, 2), (2, 1), (3, 1)], start=6):
            result = steps.runner.execute(plan(step, [(2, start, count, 1)]))
            tokens[-1].append(unpack_ints(result.token_ids).tolist())
    assert tokens[0] == tokens[1]


def test_a_captured_graph_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, **SIZES)
    steps = Steps(load(tmp_path, triton_backend()), graphs=(2,))
    compiled = steps.model._run
    assert isinstance(compiled, GraphCompiled)
    assert list(compiled._graphs) == [Bucket(2, 64)]
    replays = []
    graph = compiled._graphs[Bucket(2, 64)].graph
    replay = type(graph).replay
    monkeypatch.setattr(type(graph), "replay", lambda self: (replays.append(1), replay(self)))
    steps.generate(SAMPLINGS["greedy"], 5)
    assert len(replays) == 4, "of the six steps, the last four are decodes of two rows"


class Watched(Steps):
    """Greedy steps, and the logits that each row was sampled from."""

    def __init__(self, model: LlamaModel) -> None:
        super().__init__(model)
        self.seen: dict[int, list[list[int]]] = {row: [] for row in range(4)}
        self.step = 0
        model.backend.draw = self._draw

    def _draw(self, logits: torch.Tensor, batch: GpuBatch, *settings: Any) -> Drawn:
        for row, of_row in zip(batch.sampling_rows.tolist(), logits, strict=True):
            self.seen[row].append(of_row.view(torch.int32).tolist())
        return TritonBackend.draw(self.model.backend, logits, batch, *settings)

    def run(self, *scheduled: tuple[int, int, int, int], new: Sequence[NewRow] = ()) -> None:
        self.runner.execute(plan(self.step, scheduled, new=new))
        self.step += 1


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "integers"])
def test_deterministic_rows_have_the_same_bits_in_every_batch(tmp_path: Path, packed: bool) -> None:
    """Alone or among decodes, beside a chunk or two, with the prompt whole or in pieces of which one is a decode."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    save_tiny(tmp_path, **sizes)
    if packed:
        pack_model(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False})
    model = load(tmp_path, triton_backend(deterministic=True))
    prompt = [(7 * at * at + 3) % 101 for at in range(21)]
    others = [new_row(row, [row] * (3 + row), range(6 * row, 6 * row + 6)) for row in range(2)]
    mine = new_row(2, prompt, range(12, 20))
    # The table's own segments are longer than this pool.
    tiles = {"BLOCK_M": 16, "TILE": 8, "SEGMENT": 8, "num_warps": 4, "num_stages": 2}
    with trying(tiles, "prefill_attention_deterministic"):
        alone = Watched(model)
        alone.run((2, 0, 21, 1), new=[mine])
        for position in (21, 22, 23):
            alone.run((2, position, 1, 1))
        mixed = Watched(model)
        mixed.run((0, 0, 3, 1), (2, 0, 9, 0), new=[others[0], mine])
        mixed.run((2, 9, 1, 0), (1, 0, 4, 1), (0, 3, 1, 1), new=[others[1]])
        mixed.run((2, 10, 11, 1), (0, 4, 1, 1))
        mixed.run((0, 5, 1, 1), (1, 4, 1, 1), (2, 21, 1, 1))
        mixed.run((3, 0, 6, 1), (2, 22, 1, 1), new=[new_row(3, [9] * 6, range(20, 24))])
        mixed.run((2, 23, 1, 1))
    assert len(alone.seen[2]) == 4
    assert mixed.seen[2] == alone.seen[2]


@pytest.mark.parametrize("tied", [False, True])
def test_rounding_leaves_the_table_as_it_is(tmp_path: Path, tied: bool) -> None:
    oracle = save_tiny(tmp_path, **SIZES, intermediate_size=128, tie_word_embeddings=tied)
    given: list[object] = []
    backend = triton_backend()
    load_vocabulary = backend.load_vocabulary

    def record(table: Any, head: Any) -> Any:
        given.extend((table, head))
        return load_vocabulary(table, head)

    backend.load_vocabulary = record  # type: ignore[method-assign]
    LlamaModel(
        read_arch(tmp_path), None, Weights(open_source(tmp_path), lambda fraction: None, 4), backend, LocalComm()
    )
    table, head = given
    assert isinstance(table, torch.Tensor)
    assert torch.equal(table, oracle.get_input_embeddings().weight.detach())
    assert head is None if tied else isinstance(head, QuantizedWeight) and head.bits == 8


def test_the_plan_takes_the_heads_that_the_kernels_take() -> None:
    for bounds in (device_choices, attention_tile):
        assert (bounds.HEAD_STEP, bounds.LARGEST_HEAD) == (16, 256)
    with pytest.raises(StartError, match="heads have 24 dimensions; the GPU kernels take multiples of 16 up to 256"):
        triton_backend().allocate_kv(1, 2, 4, 2, 24)


def test_buckets_cover_all_contexts() -> None:
    assert buckets_of([4, 1], 9000) == [
        Bucket(1, 2048),
        Bucket(1, 8192),
        Bucket(1, 9000),
        Bucket(4, 2048),
        Bucket(4, 8192),
        Bucket(4, 9000),
    ]
    assert buckets_of([2], 100) == [Bucket(2, 100)]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_blocks_go_to_the_host_and_back(kv_dtype: str) -> None:
    backend = triton_backend(kv_dtype=kv_dtype)
    kv = backend.allocate_kv(2, 6, 4, 3, 16)
    random = torch.Generator().manual_seed(0)
    for part in kv.parts():
        part.copy_(torch.randint(0, 255, part.shape, dtype=torch.uint8, generator=random))
    before = [part.clone() for part in kv.parts()]
    host = backend.allocate_host_kv(kv, 4)
    backend.copy_blocks_out(kv, host, torch.tensor([[5, 0], [2, 3]]))
    backend.copy_blocks_in(kv, host, torch.tensor([[0, 1], [3, 5]]))
    for part, old in zip(kv.parts(), before, strict=True):
        assert torch.equal(part[:, :, 1], old[:, :, 5])
        assert torch.equal(part[:, :, 5], old[:, :, 2])
        assert torch.equal(part[:, :, [0, 2, 3, 4]], old[:, :, [0, 2, 3, 4]])
