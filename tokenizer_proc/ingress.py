"""From a validated request and its encoded prompt to what the scheduler gets."""

import os
from collections.abc import Iterator, Sequence

from msgspec import Struct

from config.schema import GenerationDefaults
from ipc.codec import pack_floats, pack_ints
from ipc.engine_messages import SamplingSpec, Submit
from ipc.messages import ChatPrompt, Generate, ModelInfo, SamplingDefaults, SamplingParams
from ipc.validation import InvalidRequest, check_listed

from .vocabulary import Vocabulary

_SEED_MASK = (1 << 64) - 1


class Limits(Struct, frozen=True):
    """What the engine behind can take; counts of tokens."""

    model: ModelInfo
    eos_token_ids: tuple[int, ...]
    pool_tokens: int  # positions in the KV pool
    stop_on_loop: int = 0  # repeats that end an output, for requests that do not say
    max_new_tokens: int | None = None  # the model's own limit, for requests that do not say

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together that can ever be computed."""
        return min(self.model.max_model_len, self.pool_tokens)


def sampling_defaults(model: GenerationDefaults, vocab_size: int) -> SamplingDefaults:
    """What the model recommends, and OpenAI's defaults where it says nothing."""
    said = {name: getattr(model, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    if model.top_k is not None:
        said["top_k"] = min(model.top_k, vocab_size)
    used = {name: value for name, value in said.items() if value is not None}
    return SamplingDefaults(**used, max_tokens=model.max_new_tokens)


def prompt_name(message: Generate) -> str:
    """The request field that the prompt came in, for error messages."""
    return "messages" if isinstance(message.prompt, ChatPrompt) else "prompt"


def output_budget(num_prompt: int, message: Generate, limits: Limits) -> int:
    """Most tokens that each choice may generate; `InvalidRequest` when prompt and output do not fit the context."""
    name = prompt_name(message)
    context = limits.model.max_model_len
    params = message.params
    if num_prompt == 0:
        raise InvalidRequest(f"{name}: the prompt has no tokens; at least one is needed", name)
    if num_prompt >= context:
        raise InvalidRequest(
            f"{name}: the prompt has {num_prompt} tokens, but prompt and output together may have at most {context}, "
            "one of them of output",
            name,
            "context_length_exceeded",
        )
    _check_queue(num_prompt, params.n, limits)
    check_listed(num_prompt, params.n, params.prompt_logprobs)
    if params.max_tokens is None:
        budget = max(1, limits.longest - num_prompt)
        if limits.max_new_tokens is not None:
            budget = max(min(budget, limits.max_new_tokens), min(budget, params.min_tokens))
        if params.min_tokens > budget:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but after a prompt of {num_prompt} tokens only {budget} fit",
                "min_tokens",
            )
        return budget
    if num_prompt + params.max_tokens > context:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, but prompt and output together "
            f"may have at most {context} tokens",
            "max_tokens",
            "context_length_exceeded",
        )
    return max(1, params.max_tokens)


def _check_queue(num_prompt: int, choices: int, limits: Limits) -> None:
    """Choices wait one by one: more than the queue ever holds would be told to try again for ever."""
    if choices > limits.model.max_queue_requests:
        raise InvalidRequest(
            f"n is {choices}, but at most {limits.model.max_queue_requests} choices can wait (--max-queue-requests)",
            "n",
        )
    waiting = num_prompt * (choices - 1)
    if waiting > limits.model.max_queue_tokens:
        raise InvalidRequest(
            f"n is {choices}: while one choice starts, the others wait with {waiting} prompt tokens together, but at "
            f"most {limits.model.max_queue_tokens} can (--max-queue-tokens)",
            "n",
        )


def bad_word_ids(words: Sequence[str], vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """Token ids, int32, of each word as it stands at the beginning of a text and behind a space."""
    found: dict[bytes, None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            found[pack_ints(vocabulary.encode(text, add_special_tokens=False))] = None
    found.pop(b"", None)
    return tuple(found)


def submits(
    request_ids: Sequence[int],
    prompt: Sequence[int],
    message: Generate,
    limits: Limits,
    bad_words: tuple[bytes, ...] = (),
    grammar: str = "",
) -> Iterator[Submit]:
    """One `Submit` for each choice, in order of index, under `request_ids`; `bad_words` as `bad_word_ids` gives them,
    `grammar` the compiled one.

    Log-probabilities of the prompt are asked of the first choice only: the others share its prompt.

    Choice i of a request with seed s uses seed s + i (modulo 2^64); without a seed each choice draws its own.
    """
    params = message.params
    budget = output_budget(len(prompt), message, limits)
    if max(prompt) >= limits.model.vocab_size:
        # Tokenizers of fine-tuned models sometimes know special tokens that the embedding has no row for.
        name = prompt_name(message)
        raise InvalidRequest(f"{name}: it holds a special token that the model has no embedding for", name)
    # A grammar allows end-of-sequence only where the output is whole, so there is nothing to ignore.
    ignore_eos = params.ignore_eos and not grammar
    stop_ids = sorted({*params.stop_token_ids, *(() if ignore_eos else limits.eos_token_ids)})
    token_ids, stop_token_ids = pack_ints(prompt), pack_ints(stop_ids)
    for index, request_id in enumerate(request_ids):
        if params.seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        else:
            seed = (params.seed + index) & _SEED_MASK
        yield Submit(
            request_id,
            token_ids,
            budget,
            params.min_tokens,
            stop_token_ids,
            _sampling(params, seed, stop_token_ids if params.min_tokens else b"", bad_words, grammar, index),
            message.namespace,
            external_id=message.external_id,
            tenant=message.tenant,
            priority=message.priority,
            ttft_target_ms=message.ttft_target_ms,
            cache_pin_seconds=message.cache_pin_seconds,
            stop_on_loop=limits.stop_on_loop if params.stop_on_loop is None else params.stop_on_loop,
            score_prompt=params.prompt_logprobs is not None and index == 0,
            pooling=message.pooling,
            tells_timings=bool(params.stop),
            choice=index,
            choices=len(request_ids),
        )


def _sampling(
    params: SamplingParams, seed: int, banned_ids: bytes, bad_words: tuple[bytes, ...], grammar: str, index: int
) -> SamplingSpec:
    scored = params.prompt_logprobs if index == 0 else None
    return SamplingSpec(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=pack_ints(params.logit_bias.keys()),
        bias_values=pack_floats(params.logit_bias.values()),
        min_tokens=params.min_tokens,
        banned_ids=banned_ids,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if scored is None else scored,
        allowed_ids=pack_ints(sorted(set(params.allowed_token_ids))),
        bad_words=bad_words,
        grammar=grammar,
    )
