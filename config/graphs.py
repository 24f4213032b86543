"""Which decode batches are captured as CUDA graphs: the worker captures them, the memory plan counts them."""


def graph_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes, ascending, up to `largest`; a batch runs in the smallest one that holds it. Empty for 0.

    1, 2, 4, 8, then every 8 to 64, then every 16: small batches gain most from a graph of nearly their own size.
    """
    sizes = (1, 2, 4, 8, *range(16, 65, 8), *range(80, largest, 16))
    return (*(size for size in sizes if size < largest), largest) if largest else ()
