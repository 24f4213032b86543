"""Each op of the native backend against the oracle in float64, within what float32 allows, and its bits in any batch.

Products of quantized weights are compared with exact sums over the same codes, which leaves float32 rounding only.
"""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_workers.backend import LoadedWeight
from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.backends.native_recording import Value
from gpu_workers.batch import ForwardBatch
from gpu_workers.weights.quantized import GROUP, QuantizedWeight
from kernels import reference

from .recorded import Op, Prepare, Recorded, batch_of, evaluate, gated_linear, in_turn, linear, rms_norm

# 25, or what the plugin `sanitized` makes of it
EXAMPLES = settings(max_examples=settings.default.max_examples // 4, deadline=None)
LARGEST_CODE = {"int4": 127, "int4 without minimums": 127, "int8": 32767}  # of activations, beside such weights
ULP = 2.0**-24  # largest relative error of a rounding to float32
KINDS = ["float32", "bfloat16", "int4", "int4 without minimums", "int8"]
FLOATS, INTEGERS = KINDS[:2], KINDS[2:]

seeds = st.integers(0, 1 << 30)
row_counts = st.integers(1, 9) | st.integers(1, 100)
odd_sizes = st.integers(1, 70) | st.sampled_from([127, 128, 129, 200])


@pytest.fixture(autouse=True)
def compiled(library: ctypes.CDLL) -> Iterator[None]:
    """Skips where there are no native kernels; leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_rows(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    """Of very different magnitudes, some zero here and there and for a while."""
    x = torch.randn(rows, width, generator=random) * 10 ** (4 * torch.rand(rows, 1, generator=random) - 2)
    x[torch.rand(rows, width, generator=random) < 0.05] = 0
    x[:, GROUP : 2 * GROUP][torch.rand(rows, generator=random) < 0.2] = 0
    return x


def random_weight(kind: str, n: int, k: int, random: torch.Generator) -> LoadedWeight:
    """Quantized ones are views of larger ones, with scales and minimums that half floats can hold."""
    if kind in FLOATS:
        weight = torch.randn(n, k, generator=random)
        return weight if kind == "float32" else weight.bfloat16()
    scales, minimums = (torch.randn(2, n, k // GROUP + 1, generator=random) * 0.05).half().float()
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k + GROUP), dtype=torch.int8, generator=random)
        codes[0, GROUP:] = -128
        whole = QuantizedWeight(8, codes, scales, None)
    else:
        codes = torch.randint(16, (n, k + GROUP), dtype=torch.uint8, generator=random)
        whole = QuantizedWeight(4, codes, scales, None if "without" in kind else minimums)
    return whole.narrow(1, GROUP, k)


def dequantized(weight: LoadedWeight) -> torch.Tensor:
    """[N, K] float64, exact."""
    if not isinstance(weight, QuantizedWeight):
        return weight.double()
    spread = lambda x: x.double().repeat_interleave(GROUP, dim=1)  # noqa: E731
    values = weight.codes * spread(weight.scales)
    return values if weight.minimums is None else values + spread(weight.minimums)


def magnitudes(weight: LoadedWeight) -> torch.Tensor:
    """[N, K] float64: sizes of what is added up for each element."""
    if not isinstance(weight, QuantizedWeight):
        return weight.double().abs()
    absolute = QuantizedWeight(
        weight.bits,
        weight.codes.int().abs(),
        weight.scales.abs(),
        None if weight.minimums is None else weight.minimums.abs(),
    )
    return dequantized(absolute)


def outliers(kind: str, x: torch.Tensor) -> torch.Tensor:
    """[R, K]: what is multiplied as it is, zero elsewhere; beside int4 weights the four largest of a row.

    Of equal magnitudes, those of earlier groups, and there the first; zeros may be among them.
    """
    kept = torch.zeros_like(x)
    if kind != "int8":
        order = x.abs().sort(dim=1, descending=True, stable=True).indices[:, :4]
        kept.scatter_(1, order, x.gather(1, order))
    return kept


def quantize(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the scale of each element, [R, K] float32: of each 32 the largest is the largest code.

    Halves are rounded to even. Groups up to 1e-30 are zeros.
    """
    groups = (x - outliers(kind, x)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 1e-30, largest, 0)
    most = torch.full_like(largest, LARGEST_CODE[kind])  # as a tensor, since torch divides a number by its reciprocal
    codes = torch.round(groups * torch.where(largest > 0, most / largest, 0))
    return codes.flatten(-2), (largest / most).expand_as(groups).flatten(-2)


def as_multiplied(kind: str, x: torch.Tensor) -> torch.Tensor:
    """What the codes and the outliers stand for, in float64."""
    codes, scales = quantize(kind, x)
    return codes.double() * scales.double() + outliers(kind, x).double()


def largest_of_groups(x: torch.Tensor) -> torch.Tensor:
    """[R, K] float64: of each element, the largest magnitude among its 32."""
    groups = x.double().unflatten(-1, (-1, GROUP)).abs()
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)


def sum_error(x: torch.Tensor, weight: LoadedWeight) -> torch.Tensor:
    """Bound [R, N] of the rounding in sums of as many float32 products as inputs (Higham 2002, section 3.1)."""
    return (weight.shape[1] + 8) * ULP * (x.double().abs() @ magnitudes(weight).T)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float) -> None:
    error = (actual.double() - expected).abs()
    assert actual.shape == expected.shape
    assert (error <= bound + 1e-30).all(), f"{(error - bound).max()} over the bound"


# --- products --------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(kind=st.sampled_from(FLOATS), rows=row_counts, n=odd_sizes, k=odd_sizes, biased=st.booleans(), seed=seeds)
@example(kind="float32", rows=49, n=960, k=576, biased=False, seed=0)
@example(kind="bfloat16", rows=3, n=576, k=1536, biased=True, seed=0)
def test_a_product_with_float_weights(kind: str, rows: int, n: int, k: int, biased: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, weight = random_rows(rows, k, random), random_weight(kind, n, k, random)
    bias = torch.randn(n, generator=random) if biased else None
    expected = reference.linear(x.double(), dequantized(weight), None if bias is None else bias.double())
    bound = sum_error(x, weight) + 2 * ULP * expected.abs()
    assert_within(evaluate(x, linear(weight, bias), n), expected, bound)


def gated_source(k: int, random: torch.Generator) -> Prepare:
    return gated_linear(torch.randn(2 * k, k, generator=random), None, "silu")


def norm_source(k: int, random: torch.Generator) -> Prepare:
    return rms_norm(torch.randn(k, generator=random), 1e-5)


@EXAMPLES
@given(
    kind=st.sampled_from(INTEGERS),
    source=st.sampled_from([norm_source, gated_source]),
    rows=row_counts,
    n=odd_sizes,
    groups=st.integers(1, 6),
    biased=st.booleans(),
    seed=seeds,
)
@example(kind="int4", source=norm_source, rows=49, n=192, groups=48, biased=False, seed=0)
@example(kind="int8", source=gated_source, rows=3, n=576, groups=18, biased=True, seed=0)
def test_a_product_with_quantized_weights(
    kind: str,
    source: Callable[[int, torch.Generator], Prepare],
    rows: int,
    n: int,
    groups: int,
    biased: bool,
    seed: int,
) -> None:
    """Against exact sums over the codes that the inputs get, and over the inputs themselves."""
    random = torch.Generator().manual_seed(seed)
    k = GROUP * groups
    inputs, before, weight = random_rows(rows, k, random), source(k, random), random_weight(kind, n, k, random)
    bias = torch.randn(n, generator=random) if biased else None
    actual = evaluate(inputs, in_turn(before, linear(weight, bias)), n)
    x = evaluate(inputs, before, k)  # its exactness is tested on its own
    exact_bias = torch.zeros(n) if bias is None else bias.double()
    expected = reference.linear(as_multiplied(kind, x), dequantized(weight), exact_bias)
    bound = sum_error(largest_of_groups(x), weight) + 4 * ULP * expected.abs()
    assert_within(actual, expected, bound)
    rounding = quantize(kind, x)[1].double() / 2 * 1.01  # half a step
    unquantized = reference.linear(x.double(), dequantized(weight), exact_bias)
    assert_within(actual, unquantized, bound + (rounding + 1e-30) @ dequantized(weight).abs().T)


@EXAMPLES
@given(
    kind=st.sampled_from(KINDS),
    activation=st.sampled_from(["silu", "gelu"]),
    rows=row_counts,
    width=odd_sizes,
    groups=st.integers(1, 4),
    biased=st.booleans(),
    seed=seeds,
)
@example(kind="int4", activation="silu", rows=49, width=100, groups=4, biased=False, seed=0)
@example(kind="int8", activation="gelu", rows=5, width=33, groups=2, biased=True, seed=0)
def test_a_gated_product(
    kind: str,
    activation: str,
    rows: int,
    width: int,
    groups: int,
    biased: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    k = GROUP * groups - (7 if kind in FLOATS else 0)
    inputs, before = random_rows(rows, k, random), norm_source(k, random)
    weight = random_weight(kind, 2 * width, k, random)
    bias = torch.randn(2 * width, generator=random) if biased else None
    actual = evaluate(inputs, in_turn(before, gated_linear(weight, bias, activation)), width)
    x = evaluate(inputs, before, k)
    as_codes = kind in INTEGERS
    seen = as_multiplied(kind, x) if as_codes else x.double()
    exact, exact_bias = dequantized(weight), torch.zeros(2 * width) if bias is None else bias.double()
    gate_up = reference.linear(seen, exact, exact_bias)
    error = sum_error(largest_of_groups(x) if as_codes else x, weight) + ULP * (seen.abs() @ exact.abs().T)
    gate_error, up_error = (error + 8 * ULP * gate_up.abs()).chunk(2, dim=-1)
    gate, up = (half.abs() for half in gate_up.chunk(2, dim=-1))
    # Both activations have slopes below 1.2, and are computed to within 1e-6 of their input.
    bound = 1.2 * gate_error * (up + up_error) + gate * up_error + 1e-6 * gate * up
    assert_within(actual, reference.gated_activation(gate_up, activation), bound)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_products_have_the_same_bits_in_any_batch(kind: str, threads: int) -> None:
    random = torch.Generator().manual_seed(7)
    k, n, width = 5 * GROUP, 203, 100
    inputs, before = random_rows(150, k, random), norm_source(k, random)
    weight, gate_up = random_weight(kind, n, k, random), random_weight(kind, 2 * width, k, random)
    for ops, size in [
        (in_turn(before, linear(weight, torch.randn(n, generator=random))), n),
        (in_turn(gated_source(k, random), linear(weight)), n),
        (in_turn(before, gated_linear(gate_up, None, "silu")), width),
    ]:
        expected = evaluate(inputs, ops, size)
        recorded = Recorded(inputs, ops, size, threads)
        for rows in [*range(1, 15), 47, 48, 49, 50, 97, 150]:
            ids = torch.randperm(150, generator=random)[:rows]
            assert torch.equal(recorded.rows(ids), expected[ids]), rows


# --- extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("up", [-1e-3, -3e-3])
def test_a_group_of_tiny_values_is_about_zero(up: float) -> None:
    """silu(-100) is some -1e-36, of which the float32 reciprocal overflows."""
    random = torch.Generator().manual_seed(0)
    gated = gated_linear(torch.cat([torch.eye(GROUP), up * torch.eye(GROUP)]), None, "silu")
    product = linear(random_weight("int4", 8, GROUP, random))
    inputs = torch.full((1, GROUP), -100.0)
    actual = evaluate(inputs, in_turn(gated, product), 8)
    assert (actual.abs() < 1e-30).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none(kind: str, value: float) -> None:
    """The sampler refuses NaN: a model that overflows must not go on with numbers that mean nothing."""
    random = torch.Generator().manual_seed(0)
    k = 2 * GROUP
    inputs = torch.ones(1, k)
    inputs[0, 3] = value
    product = linear(random_weight(kind, 8, k, random))
    for source in (norm_source(k, random), gated_source(k, random)):
        actual = evaluate(inputs, in_turn(source, product), 8)
        assert actual.isnan().all()


# --- norms -----------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(rows=row_counts, k=odd_sizes, eps=st.sampled_from([1e-6, 1e-5, 1e-2]), seed=seeds)
def test_rms_norm(rows: int, k: int, eps: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, weight = random_rows(rows, k, random), torch.randn(k, generator=random)
    x[0] = 0
    expected = reference.rms_norm(x.double(), weight.double(), torch.tensor(eps).double().item())
    assert_within(evaluate(x, rms_norm(weight, eps), k), expected, (k + 20) * ULP * expected.abs())


def add_and_norm(added: torch.Tensor, norm: torch.Tensor, result: int) -> Prepare:
    """add_rms_norm of x * `added` and x; `result` 0: the normed sum, 1: the sum."""

    def prepare(backend: NativeCpuBackend) -> Op:
        weight, loaded = backend.load_linear(added, None), backend.load_norm(norm)

        def op(x: Value, batch: ForwardBatch, kv: object) -> Value:
            both = [backend.select_logits_rows(part, batch) for part in (backend.linear(x, weight), x)]
            return backend.add_rms_norm(*both, loaded, 1e-5)[result]

        def op_of_all_rows(x: Value, batch: ForwardBatch, kv: object) -> Value:
            return backend.add_rms_norm(backend.linear(x, weight), x, loaded, 1e-5)[result]

        return op if result == 0 else op_of_all_rows

    return prepare


@EXAMPLES
@given(rows=row_counts, k=odd_sizes, wanted=st.integers(1, 120), seed=seeds)
def test_a_residual_is_added_and_the_sum_normed_in_the_wanted_rows(rows: int, k: int, wanted: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, norm = random_rows(rows, k, random), torch.randn(k, generator=random)
    added = torch.diag(torch.randn(k, generator=random))  # exact products: one rounding each
    total = x.double() + (x * added.diagonal()).double()
    chosen = torch.randint(rows, (wanted,), generator=random)
    assert torch.equal(evaluate(x, add_and_norm(added, norm, 1), k), total.float())
    actual = Recorded(x, add_and_norm(added, norm, 0), k).rows(torch.arange(rows), chosen)
    expected = reference.rms_norm(total.float().double(), norm.double(), 1e-5)[chosen]
    assert_within(actual, expected, (k + 20) * ULP * expected.abs())


def test_norms_carry_on_from_the_sum_that_was_kept() -> None:
    """Two layers: what the first adds is in the residual of the second."""
    random = torch.Generator().manual_seed(3)
    x, first, second = random_rows(11, 40, random), *torch.randn(2, 40, 40, generator=random)
    norms = torch.randn(3, 40, generator=random)

    def prepare(backend: NativeCpuBackend) -> Op:
        weights = [backend.load_linear(weight, None) for weight in (first, second)]
        loaded = [backend.load_norm(norm) for norm in norms]

        def op(x: Value, batch: ForwardBatch, kv: object) -> Value:
            normed, residual = backend.rms_norm(x, loaded[0], 1e-5), x
            for weight, norm in zip(weights, loaded[1:], strict=True):
                normed, residual = backend.add_rms_norm(backend.linear(normed, weight), residual, norm, 1e-5)
            return normed

        return op

    residual = x.double()
    normed = reference.rms_norm(residual, norms[0].double(), 1e-5)
    for weight, norm in zip((first, second), norms[1:], strict=True):
        added = reference.linear(normed, weight.double())
        normed, residual = reference.add_rms_norm(added, residual, norm.double(), 1e-5)
    recorded = Recorded(x, prepare, 40)
    for _ in range(2):  # a second step starts from nothing
        torch.testing.assert_close(recorded.rows(torch.arange(11)).double(), normed, rtol=1e-4, atol=1e-4)


def test_a_result_that_was_overwritten_is_not_used() -> None:
    def prepare(backend: NativeCpuBackend) -> Op:
        weight = backend.load_linear(torch.eye(8), None)

        def op(x: Value, batch: ForwardBatch, kv: object) -> Value:
            first = backend.linear(x, weight)
            backend.linear(x, weight)
            return backend.linear(first, weight)

        return op

    with pytest.raises(RuntimeError, match="after the next op of its kind has overwritten it"):
        evaluate(torch.ones(1, 8), prepare, 8)


# --- embedding -------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    kind=st.sampled_from(KINDS),
    n=odd_sizes,
    groups=st.integers(1, 3),
    first=st.integers(0, 100),
    rows=row_counts,
    seed=seeds,
)
def test_an_embedding_has_zeros_for_the_ids_of_other_ranks(
    kind: str, n: int, groups: int, first: int, rows: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    k = GROUP * groups - (5 if kind in FLOATS else 0)
    weight = random_weight(kind, n, k, random)
    backend = NativeCpuBackend(torch.float32, 1, quantized=True)
    table, _ = backend.load_vocabulary(weight, None)
    unit = backend.load_linear(torch.eye(k), None)
    ids = torch.randint(first + n + 20, (rows,), generator=random)
    ids[0] = first + n - 1
    batch, kv = batch_of(ids), backend.allocate_kv(1, 1, 8, 1, 8)
    forward = backend.compile(
        lambda batch, kv: backend.embed(table, batch, first), lambda x, batch: x, lambda x: backend.logits(x, unit)
    )
    actual = forward(batch, kv)
    values = dequantized(weight) if not isinstance(weight, QuantizedWeight) else weight.dequantize().double()
    padded = torch.cat([torch.zeros(first, k), values, torch.zeros(20, k)])
    assert torch.equal(actual.double(), padded[ids])
