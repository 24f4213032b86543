"""Which decode batches are captured as CUDA graphs: the worker captures them, the memory plan counts them."""

_SHORTEST_CONTEXT = 2048


def graph_buckets(largest: int) -> tuple[int, ...]:
    """Numbers of sequences, ascending, up to `largest`; a batch runs in the smallest that holds it. Empty for 0.

    1, 2, 4, 8, then every 8 to 64, then every 16: small batches gain most from a graph of nearly their own size.
    """
    sizes = (1, 2, 4, 8, *range(16, 65, 8), *range(80, largest, 16))
    return (*(size for size in sizes if size < largest), largest) if largest else ()


def graph_contexts(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts, ascending, for which every number of sequences has a graph: 2048, and four times as many ..."""
    contexts = [min(_SHORTEST_CONTEXT, max_model_len)]
    while contexts[-1] < max_model_len:
        contexts.append(min(4 * contexts[-1], max_model_len))
    return tuple(contexts)
