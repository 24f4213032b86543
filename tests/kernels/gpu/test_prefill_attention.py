"""Prefill attention over a paged pool against the oracle, and that a row's bits depend on nothing but its sequence."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import poisoned
from tests.kernels.gpu.paged import Batch, make_batch
