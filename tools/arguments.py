"""Command lines of the tools: how their help looks, types of numbers for argparse, and how they end."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn, get_args

from config.schema import QuantizationName

_INTERRUPTED = 130  # as shells have it of SIGINT


def tool_parser(
    name: str, description: str | None, epilog: str, *, usage: str | None = None
) -> argparse.ArgumentParser:
    """The parser of `python -m tools.NAME`; both texts are printed as they are, and options can't be shortened."""
    return argparse.ArgumentParser(
        prog=f"python -m tools.{name}",
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end with its status; an interrupt ends it without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}")
    return value


def positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text}")
    return value


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 999999999, not {text!r}")
    return int(text)


def count(text: str) -> int:
    value = whole(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def counts(most: int) -> Callable[[str], list[int]]:
    """The type of comma-separated numbers from 1 to `most`; an empty text is none of them."""

    def parse(text: str) -> list[int]:
        numbers = [whole(part) for part in text.split(",") if part]
        if not all(1 <= number <= most for number in numbers):
            raise argparse.ArgumentTypeError(f"{text}: each must be from 1 to {most}")
        return numbers

    return parse


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """End with an error about the first option of `names` that was given; without, each is None or empty."""
    for name in names:
        if getattr(arguments, name) not in (None, []):
            parser.error(f"--{name.replace('_', '-')}: {why}")


def add_numbers(parser: argparse.ArgumentParser, kv_default: str, kv_help: str, gpu: bool = False) -> None:
    """The options of a model in one process that say in which numbers it computes, as a server's do.

    `gpu`: number types of GPUs are choices, too.
    """
    parser.add_argument(
        "--kernels", choices=("auto", "native", "torch"), default="auto", help="CPU kernels, as of the server"
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(QuantizationName),
        default="auto",
        help="quantized weights are multiplied as integers (auto), or dequantized (none); or float weights rounded to "
        "integers too (int8, int4); as of the server",
    )
    dtypes = ("float32", "bfloat16", *(("float16",) if gpu else ()))
    by_default = " (default: float32, on a GPU bfloat16)" if gpu else ""
    parser.add_argument("--dtype", choices=dtypes, default="float32", help=f"compute dtype{by_default}")
    kv_dtypes = ("float32", "float16", "bfloat16", "int8", *(("fp8",) if gpu else ()))
    parser.add_argument("--kv-dtype", choices=kv_dtypes, default=kv_default, help=kv_help)
