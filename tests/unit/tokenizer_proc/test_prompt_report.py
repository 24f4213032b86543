"""What a request is told of its prompt, and when."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from config.schema import GenerationDefaults
from ipc.codec import pack_floats, pack_ints, unpack_ints
from ipc.engine_messages import PromptScores, RowOutput
from ipc.messages import (
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    Outputs,
    PromptInfo,
    SamplingDefaults,
    SamplingParams,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenPrompt,
)
from ipc.validation import MAX_PROMPT_LOGPROBS
from tests.unit.tokenizer_proc.test_service import EOS, HELLO, MODEL, PEER, VOCABULARY, Bench, row
from tokenizer_proc.ingress import bad_word_ids, sampling_defaults
from tokenizer_proc.prompt_report import PromptReport

TEXT = "hello 🌶 a"
IDS = VOCABULARY.encode(TEXT, add_special_tokens=False)


def scores(first: int, count: int, k: int = 1, **changes: Any) -> PromptScores:
    """Entries whose log-probability is minus the number of their token."""
    columns = {
        "chosen": pack_floats(-float(first + at) for at in range(count)),
        "ranks": pack_ints(range(first, first + count)),
        "top_ids": pack_ints([HELLO] * (count * k)),
        "top_values": pack_floats([-0.5] * (count * k)),
    }
    return PromptScores(0, first, **(columns | changes))


def report(prompt: Any = None, ids: list[int] = IDS, **params: Any) -> PromptReport:
    message = Generate(7, prompt or TextPrompt(TEXT), SamplingParams(**params), return_prompt=True)
    return PromptReport(message, ids, VOCABULARY)


def test_positions_come_in_parts_and_are_told_whole() -> None:
    one = report(prompt_logprobs=1)
    one.take(scores(1, 3))
    assert not one.complete
    one.take(scores(4, len(IDS) - 4))
    assert one.complete
    info = one.info()
    assert [position.chosen.token_id for position in info.positions] == IDS[1:]
    assert [position.chosen.logprob for position in info.positions] == [-float(at) for at in range(1, len(IDS))]
    assert [position.rank for position in info.positions] == list(range(1, len(IDS)))
    assert {position.top[0].token for position in info.positions} == {"hello"}
    spelled = [info.first_token.encode(), *(position.chosen.token_bytes for position in info.positions)]
    assert b"".join(spelled).decode() == info.text == TEXT


def test_offsets_point_into_the_text_also_within_a_character() -> None:
    one = report(prompt_logprobs=0)
    one.take(scores(1, len(IDS) - 1, k=0))
    info = one.info()
    pepper = TEXT.index("🌶")
    for token_id, offset in zip(IDS, unpack_ints(info.offsets), strict=True):
        spelled = VOCABULARY.token_bytes(token_id)
        if spelled.isascii():
            assert TEXT[offset:].startswith(spelled.decode())
        else:
            assert offset in (pepper - 1, pepper)


def test_b048_token_ids_are_decoded() -> None:
    info = report(TokenPrompt(pack_ints(IDS))).info()
    assert (info.text, list(unpack_ints(info.token_ids))) == (TEXT, IDS)
    cut = VOCABULARY.encode("🌶", add_special_tokens=False)[:2]
    assert report(TokenPrompt(pack_ints(cut)), cut).info().text == "\ufffd"
    special = [HELLO, EOS]
    assert report(TokenPrompt(pack_ints(special)), special).info().text == "hello"
    assert report(TokenPrompt(pack_ints(special)), special, skip_special_tokens=False).info().text == "hello<|end|>"


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    one = report(TextPrompt("hello"), [HELLO], prompt_logprobs=2)
    assert one.complete
    assert one.info().positions == ()


@pytest.mark.parametrize(
    "bad",
    [
        scores(2, 1),
        scores(1, 0),
        scores(1, len(IDS)),
        scores(1, 2, ranks=pack_ints([1])),
        scores(1, 2, top_ids=pack_ints([1])),
        scores(1, 2, top_values=pack_floats([1.0] * 3)),
        scores(1, 2, chosen=b"abc"),
    ],
)
def test_columns_that_do_not_fit_are_refused(bad: PromptScores) -> None:
    with pytest.raises(ValueError):
        report(prompt_logprobs=1).take(bad)


def test_choices_that_are_ahead_wait_for_the_prompt() -> None:
    """A second choice finds the prompt in the cache, while the first one computes it anew."""
    bench = Bench()
    bench.service.from_client(PEER, Generate(1, TextPrompt(TEXT), SamplingParams(n=2, prompt_logprobs=1)))
    first, second = bench.submits
    assert (first.score_prompt, second.score_prompt) == (True, False)
    assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (1, -1)
    bench.step(plain=[(second.request_id, HELLO)])
    bench.step(row(second.request_id, HELLO, finish="length"))
    assert bench.items() == []
    bench.step(row(first.request_id, prompt_scores=scores(1, 4)))
    assert bench.items() == []
    bench.step(
        row(first.request_id, prompt_scores=scores(5, len(IDS) - 5)), row(first.request_id, HELLO, finish="length")
    )
    items = bench.items()
    assert [type(item) for item in items] == [PromptInfo, Delta, Delta, Finished, Delta, Finished]
    assert [item.index for item in items[1:]] == [1, 1, 1, 0, 0]  # type: ignore[union-attr]


def test_the_prompt_alone_comes_at_once_where_nothing_is_computed_for_it() -> None:
    bench = Bench()
    message = Generate(1, TokenPrompt(pack_ints([HELLO, EOS])), SamplingParams(), return_prompt=True)
    bench.service.from_client(PEER, message)
    (info,) = bench.items()
    assert isinstance(info, PromptInfo)
    assert list(unpack_ints(info.token_ids)) == [HELLO, EOS]
    bench.step(plain=[(bench.submits[0].request_id, HELLO)])
    assert len(bench.items()) == 2


def test_max_tokens_0_generates_nothing() -> None:
    bench = Bench()
    bench.generate(prompt=TextPrompt(TEXT), max_tokens=0, prompt_logprobs=0, logprobs=1)
    (submit,) = bench.submits
    assert submit.max_tokens == 1, "the engine knows no less"
    all_scores = scores(1, len(IDS) - 1, k=0)
    bench.step(row(submit.request_id, prompt_scores=all_scores), row(submit.request_id, HELLO, finish="length"))
    info, finished = bench.items()
    assert isinstance(info, PromptInfo)
    assert finished == Finished(1, 0, "length", None, len(IDS), 0, 0)
    assert bench.service.live_requests == 0


def test_scores_that_nobody_asked_for_fail_the_request() -> None:
    bench = Bench()
    bench.generate()
    bench.step(RowOutput(bench.submits[0].request_id, b"", prompt_scores=scores(1, 1)))
    assert bench.failure().status == 500
    assert bench.aborts == [bench.submits[0].request_id]


def test_a_failure_does_not_wait_for_the_prompt() -> None:
    bench = Bench()
    bench.generate(prompt=TextPrompt(TEXT), prompt_logprobs=1)
    bench.step(Failed(bench.submits[0].request_id, 500, "gone", "server_error"))
    assert bench.failure().message == "gone"


def test_bad_words_are_tokenized_with_and_without_a_space_ahead() -> None:
    words = [list(unpack_ints(ids)) for ids in bad_word_ids(("hello", " h"), VOCABULARY)]
    spelled = [b"".join(map(VOCABULARY.token_bytes, ids)).decode() for ids in words]
    assert spelled == ["hello", " hello", " h"]
    bench = Bench()
    bench.generate(bad_words=("hello",), allowed_token_ids=(5, 3, 5))
    (submit,) = bench.submits
    assert submit.sampling.bad_words == bad_word_ids(("hello",), VOCABULARY)
    assert list(unpack_ints(submit.sampling.allowed_ids)) == [3, 5]


async def ask(message: Tokenize | Detokenize) -> Any:
    bench = Bench()
    bench.service.from_client(PEER, message)
    while not bench.sent:
        await asyncio.sleep(0.001)
    ((peer, answer),) = bench.sent
    assert peer == PEER
    return answer


def test_tokenize_and_detokenize() -> None:
    answer = asyncio.run(ask(Tokenize(3, TextPrompt(TEXT), return_token_strs=True)))
    assert answer == Tokenized(
        3, pack_ints(IDS), tuple(VOCABULARY.token_bytes(i).decode("utf-8", "replace") for i in IDS)
    )
    assert asyncio.run(ask(Tokenize(3, TextPrompt("")))) == Tokenized(3, b"")
    assert asyncio.run(ask(Detokenize(4, pack_ints([*IDS, EOS])))) == Detokenized(4, TEXT + "<|end|>")
    long = "hello " * (2 * MODEL.max_model_len)
    tokens = asyncio.run(ask(Tokenize(5, TextPrompt(long)))).token_ids
    assert len(tokens) // 4 > MODEL.max_model_len, "it may be longer than the context"
    assert asyncio.run(ask(Detokenize(6, tokens))).text == long


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Tokenize(1, TextPrompt("\ud800")), "prompt"),
        (Tokenize(1, TextPrompt("x" * ((1 << 20) + 1))), "prompt"),
        (Detokenize(1, pack_ints([MODEL.vocab_size])), "tokens"),
        (Detokenize(1, pack_ints([-1])), "tokens"),
        (Detokenize(1, b"abc"), "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_tokenized_is_refused(message: Tokenize | Detokenize, param: str) -> None:
    answer = asyncio.run(ask(message))
    assert isinstance(answer, Outputs)
    (failed,) = answer.items
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.status, failed.param) == (1, 400, param)


@pytest.mark.parametrize(
    ("params", "budget"),
    [({}, 12), ({"max_tokens": 30}, 30), ({"min_tokens": 20}, 20), ({"max_tokens": 3}, 3)],
)
def test_the_models_own_limit_is_for_requests_that_do_not_say(params: dict[str, int], budget: int) -> None:
    bench = Bench(max_new_tokens=12)
    bench.generate(**params)
    assert bench.submits[0].max_tokens == budget


def test_the_models_own_limit_is_cut_to_what_fits() -> None:
    bench = Bench(max_new_tokens=1000)
    bench.generate(prompt=TokenPrompt(pack_ints([HELLO] * 60)))
    assert bench.submits[0].max_tokens == MODEL.max_model_len - 60


def test_sampling_defaults_are_the_models_and_else_openais() -> None:
    assert sampling_defaults(GenerationDefaults(), 50) == SamplingDefaults()
    model = GenerationDefaults(temperature=0.6, top_k=100, max_new_tokens=9)
    assert sampling_defaults(model, 50) == SamplingDefaults(temperature=0.6, top_k=50, max_tokens=9)


def test_more_values_than_a_message_holds_are_refused() -> None:
    length = MAX_PROMPT_LOGPROBS // 10
    model = structs.replace(MODEL, max_model_len=2 * length)
    bench = Bench(model=model, pool_tokens=2 * length)
    prompt = TokenPrompt(pack_ints([HELLO] * length))
    bench.generate(prompt=prompt, max_tokens=1, prompt_logprobs=10)
    failed = bench.failure()
    assert (failed.status, failed.param) == (400, "prompt_logprobs")
    assert f"are {11 * length} values, but at most {MAX_PROMPT_LOGPROBS}" in failed.message
    bench.generate(2, prompt, max_tokens=1, prompt_logprobs=5, n=2)  # each choice's answer has them again
    failed = bench.items()[-1]
    assert isinstance(failed, Failed)
    assert "2 choices" in failed.message
    bench.generate(3, prompt, max_tokens=1, prompt_logprobs=9)
    bench.generate(4, prompt, max_tokens=1, prompt_logprobs=4, n=2)
    assert len(bench.submits) == 3
