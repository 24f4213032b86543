"""Teacher-forced scoring: how far the model's log-probabilities are from a reference, or how well it predicts texts.

--reference FILE feeds prompt plus reference output of each row through the model, in this process. At every output
step whose margin (gap between the reference's best two log-probabilities) is above the tolerance, the best token must
be the reference's. The tolerance is that of the dtype's rounding, or with weights multiplied as integers 0.5.

--text FILE prints the perplexity of texts: exp of the mean negative log-likelihood (in nats) of each token given those
before it. Texts are tokenized as prompts are, and cut into pieces of --length tokens, which are scored one by one: the
first token of a piece is not scored, and a piece that was there before is left out. --against-torch scores the same
pieces with plain torch operations in float32, on weights dequantized without rounding, and prints the ratio of both
perplexities: what the kernels' arithmetic costs. Perplexities of other vocabularies or piece lengths can't be compared.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.models.llama import LlamaModel
from ipc.control import StartError
from tokenizer_proc.vocabulary import load_vocabulary
from tools.arguments import add_numbers, count, tool_parser
from tools.score.model import load, load_exact
from tools.score.perplexity import Likelihood, Scorer, ratio
from tools.score.reference import Score, score_row, tolerance_of
from tools.score.texts import pieces, read_texts

_EPILOG = """\
  python -m tools.score --model models/SmolLM2-135M-Instruct.Q4_1.gguf --reference ROWS.jsonl --kv-dtype float16
  python -m tools.score --model models/SmolLM2-135M-Instruct.Q4_1.gguf --text TEXTS.jsonl --tokens 20000 --against-torch
"""


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("score", __doc__, _EPILOG)
    parser.add_argument("--model", type=Path, required=True, help="directory with safetensors, or a .gguf file")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--reference", type=Path, help="JSONL with prompt_ids, output_ids, margins, top5")
    what.add_argument(
        "--text", type=Path, help="JSONL with text, or with input and output, in each line; any other file is one text"
    )
    parser.add_argument("--tokens", type=count, default=None, help="of --text, scored in all (default: all)")
    parser.add_argument("--length", type=count, default=1024, help="most tokens of a piece of --text (default 1024)")
    parser.add_argument("--against-torch", action="store_true", help="compare the perplexity with plain torch's")
    parser.add_argument("--threads", type=count, default=None, help="compute threads (default: torch's choice)")
    add_numbers(parser, "float32", "of the native kernels' KV cache; the server's default is float16")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 when a row of the reference has a mismatch, 2 when model or file can't be used."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.text is None and (arguments.tokens is not None or arguments.against_torch):
        parser.error("--tokens and --against-torch go with --text only")
    if arguments.length < 2:
        parser.error("--length: must be at least 2, as the first token of a piece is not scored")
    try:
        return _score_reference(arguments) if arguments.text is None else _score_text(arguments)
    except (OSError, ValueError, StartError) as error:
        print(f"tools.score: {error}", file=sys.stderr)
        return 2


def _load(arguments: argparse.Namespace, threads: int | None) -> LlamaModel:
    kernels, quantization = arguments.kernels, arguments.quantization
    return load(arguments.model, arguments.dtype, threads, kernels, quantization, arguments.kv_dtype)


def _score_reference(arguments: argparse.Namespace) -> int:
    rows = [json.loads(line) for line in arguments.reference.read_text().splitlines()]
    if not rows:
        raise ValueError(f"{arguments.reference}: there are no rows in this file")
    model = _load(arguments, arguments.threads)
    tolerance = tolerance_of(model, arguments.dtype)
    score = Score()
    started = time.monotonic()
    for number, row in enumerate(rows, start=1):
        score_row(model, row, tolerance, score)
        print(f"{number}/{len(rows)} {row['id']} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    for item in score.mismatches:
        print(f"mismatch {item.row} step {item.step}: {item.actual} for {item.expected}, margin {item.margin:.4f}")
    print(f"rows without a mismatch above margin {tolerance}: {score.rows_ok} of {score.rows}")
    print(f"rows with every token equal: {score.rows_equal} of {score.rows}; steps: {score.steps}")
    mean = sum(score.errors) / len(score.errors)
    print(
        f"log-probability error of the reference's five best: mean {mean:.6f}, p99 {score.percentile(0.99):.6f}, "
        f"worst {max(score.errors):.6f}"
    )
    return 1 if score.mismatches else 0


def _score_text(arguments: argparse.Namespace) -> int:
    threads = arguments.threads or torch.get_num_threads()  # of both: native kernels leave torch one thread
    texts = read_texts(arguments.text)
    vocabulary = load_vocabulary(arguments.model)
    found = pieces(
        texts, lambda text: vocabulary.encode(text, add_special_tokens=True), arguments.length, arguments.tokens
    )
    if not found:
        raise ValueError(f"{arguments.text}: no text in this file has two tokens")
    model = _load(arguments, threads)
    size, longest = model.arch.vocab_size, max(map(len, found))
    if longest > model.arch.max_position:
        raise ValueError(f"--length {arguments.length}: this model takes at most {model.arch.max_position} tokens")
    highest = max(map(max, found))
    if highest >= size:
        raise ValueError(f"{arguments.model}: its tokenizer knows token {highest}, but the model has only {size}")
    scorers = {_name(model, arguments): Scorer(model, longest)}
    if arguments.against_torch:
        scorers["plain torch, exact weights, float32"] = Scorer(load_exact(arguments.model, threads), longest)
    _score_pieces(found, list(scorers.values()))
    scored = sum(map(len, found)) - len(found)
    print(f"{scored:,} tokens scored, in {len(found):,} pieces of up to {longest:,} of {len(texts):,} texts")
    for name, scorer in scorers.items():
        _print_likelihood(name, scorer.likelihood)
    if arguments.against_torch:
        value, error = ratio(*(scorer.likelihood for scorer in scorers.values()))
        print(f"ratio of the perplexities {value:.5f} ({value - 1:+.3%}, standard error {error:.3%})")
    return 0


def _name(model: LlamaModel, arguments: argparse.Namespace) -> str:
    """What computes, in words."""
    if not isinstance(model.backend, NativeCpuBackend):
        return f"torch operations, {arguments.dtype}"
    integers = "" if arguments.quantization == "none" else " weights as integers,"
    return f"native kernels,{integers} {arguments.dtype}, KV {arguments.kv_dtype}"


def _score_pieces(found: list[list[int]], scorers: list[Scorer]) -> None:
    started = shown = time.monotonic()
    done, total = 0, sum(map(len, found)) - len(found)
    for number, piece in enumerate(found, 1):
        for scorer in scorers:
            scorer.score(piece)
        done += len(piece) - 1
        now = time.monotonic()
        if now - shown > 2 or number == len(found):
            shown = now
            so_far = ", ".join(f"{scorer.likelihood.perplexity:.4f}" for scorer in scorers)
            print(
                f"{done:,} of {total:,} tokens, {now - started:.0f} s: perplexity {so_far}", file=sys.stderr, flush=True
            )


def _print_likelihood(name: str, likelihood: Likelihood) -> None:
    print(f"{name}: mean negative log-likelihood {likelihood.mean:.6f}, perplexity {likelihood.perplexity:.5f}")


if __name__ == "__main__":
    sys.exit(main())
