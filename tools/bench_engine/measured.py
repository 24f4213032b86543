"""A backend that notes what its kernels were given to do, and how long they took."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_workers.backend import Backend
from gpu_workers.backends import make_backend
from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.backends.native_recording import Value
from ipc.control import StartError
from kernels.cpu.build import BuildError
from kernels.cpu.library import Engine, Op, PackedWeight, Step
from tools.bench_kernels.cases import operations_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TimedEngine(Engine):
    """Adds up the time spent in the library's calls."""

    seconds = 0.0

    def run(self, ops: "ctypes.Array[Op]", step: Step) -> None:
        start = time.perf_counter()
        super().run(ops, step)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a forward, of all its tokens or only of those whose logits are wanted."""

    weight: PackedWeight
    of_logits: bool = False

    def operations(self, tokens: int, sampled: int) -> int:
        """Two for a multiply-add."""
        rows = sampled if self.of_logits else tokens
        return 2 * rows * self.weight.n * self.weight.k


class MeasuredBackend(NativeCpuBackend):
    """The native CPU backend, which lists the products of the forward that it records."""

    def __init__(
        self, dtype: torch.dtype, threads: int, quantized: bool, kv_dtype: str, progress: Callable[[str], None]
    ) -> None:
        super().__init__(dtype, threads, quantized, kv_dtype, progress)
        self.engine = TimedEngine(self._library, threads)
        self._engine = self.engine
        self.products: list[Product] = []

    def linear(self, x: Value, weight: PackedWeight) -> Value:
        self.products.append(Product(weight))
        return super().linear(x, weight)

    def gated_linear(self, x: Value, weight: PackedWeight, kind: str) -> Value:
        self.products.append(Product(weight))
        return super().gated_linear(x, weight, kind)

    def logits(self, x: Value, head: PackedWeight) -> Value:
        self.products.append(Product(head, of_logits=True))
        return super().logits(x, head)

    def weight_bytes(self) -> int:
        """Of a step that samples: each product's weight once. Norms and rows of the embedding are few: left out."""
        return sum(product.weight.num_bytes for product in self.products)

    def operations(self, tokens: int, sampled: int) -> Counter[str]:
        """Of the products of a step: the fields of Work for operations, and how many there are."""
        totals: Counter[str] = Counter()
        for product in self.products:
            totals[operations_of(product.weight.kind)] += product.operations(tokens, sampled)
        return totals


def make_measured_backend(
    kernels: str, dtype: str, threads: int, quantized: bool, kv_dtype: str, progress: Callable[[str], None]
) -> Backend:
    """As `gpu_workers.backends.make_backend`: with native kernels, a MeasuredBackend. StartError if it can't be had."""
    if kernels != "torch":
        try:
            return MeasuredBackend(_DTYPES[dtype], threads, quantized, kv_dtype, progress)
        except BuildError as error:
            if kernels == "native":
                raise StartError(f"--kernels native: {error}") from error
            progress(f"plain torch operations instead of the CPU kernels: {error}")
    return make_backend("cpu", dtype, threads, deterministic=True, kernels="torch", quantized=quantized)
