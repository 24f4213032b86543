"""Command lines of the tools: how their help looks, and types of numbers for argparse."""

import argparse
from collections.abc import Callable


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


def add_numbers(parser: argparse.ArgumentParser, kv_default: str, kv_help: str) -> None:
    """The options of a model in one process that say in which numbers it computes, as a server's do."""
    parser.add_argument(
        "--kernels", choices=("auto", "native", "torch"), default="auto", help="CPU kernels, as of the server"
    )
    parser.add_argument(
        "--quantization",
        choices=("auto", "none"),
        default="auto",
        help="quantized weights are multiplied as integers (auto), or dequantized (none); as of the server",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype")
    parser.add_argument(
        "--kv-dtype", choices=("float32", "float16", "bfloat16", "int8"), default=kv_default, help=kv_help
    )
