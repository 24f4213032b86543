"""All native operations together: a decoder layer against the oracle, and the same bits however it is computed."""

import ctypes

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.library import Kind, KvType

from .layer import Layer, Shapes, shapes

# 25, or what the plugin `sanitized` makes of it
EXAMPLES = settings(max_examples=settings.default.max_examples // 4, deadline=None)


def tolerance(shapes: Shapes) -> float:
    """Share of the largest logit: a value at the edge of two codes or short floats may fall to the other side."""
    if shapes.quantized:
        return 3e-2 if shapes.kind == Kind.INT4 else 5e-3
    return {KvType.FLOAT32: 2e-5, KvType.FLOAT16: 3e-4, KvType.BFLOAT16: 2e-3, KvType.INT8: 2e-2}[shapes.kv_type]


@EXAMPLES
@given(shapes=shapes(), data=st.data())
def test_a_layer_is_the_oracles_and_the_same_bits_alone_batched_and_chunked(
    library: ctypes.CDLL, shapes: Shapes, data: st.DataObject
) -> None:
    layer = Layer(library, shapes)
    whole = [(sequence, 0, context) for sequence, context in enumerate(shapes.contexts)]
    alone = torch.cat([layer.run(part) for part in whole])
    for sequence, logits in enumerate(alone):
        expected = layer.expected(sequence)
        assert (logits - expected).abs().max() <= tolerance(shapes) * expected.abs().max() + 1e-6

    assert torch.equal(layer.run(*whole), alone)

    chunked = Layer(library, shapes)
    cuts = [data.draw(st.integers(0, context - 1), label="computed before") for context in shapes.contexts]
    before = [(sequence, 0, cut) for sequence, cut in enumerate(cuts) if cut]
    if before:
        chunked.run(*before)
    rest = [(sequence, cut, context) for sequence, (cut, context) in enumerate(zip(cuts, shapes.contexts, strict=True))]
    assert torch.equal(chunked.run(*rest), alone)


@EXAMPLES
@given(shapes=shapes())
def test_the_last_token_decoded_alone_is_that_of_the_prompt(library: ctypes.CDLL, shapes: Shapes) -> None:
    layer = Layer(library, shapes)
    whole = layer.run(*((sequence, 0, context) for sequence, context in enumerate(shapes.contexts)))
    decoded = layer.run(*((sequence, context - 1, context) for sequence, context in enumerate(shapes.contexts)))
    assert torch.equal(decoded, whole)
