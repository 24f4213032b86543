"""Streamed chats of the real model: ends, markers, characters."""

from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.sse import Answer, post_all

CHAT = "/v1/chat/completions"


def ask(content: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "smol", "messages": [{"role": "user", "content": content}], "temperature": 0, "stream": True}
    return body | fields


def reasons(answer: Answer) -> list[Any]:
    return [event["choices"][0]["finish_reason"] for event in answer.events]


@pytest.mark.parametrize("special", [True, False])
def test_b042_the_end_of_turn_marker_stays_out_of_the_text(server: Server, special: bool) -> None:
    (answer,) = post_all(server.url + CHAT, [ask("你好", max_tokens=200, skip_special_tokens=special)])
    assert answer.done
    assert answer.text
    assert "<|im_end|>" not in answer.text
    assert reasons(answer)[:-1] == [None] * (len(answer.events) - 1)
    assert reasons(answer)[-1] == "stop"


def test_b041_the_reason_is_what_ended_it(server: Server) -> None:
    """The limit: length. End of sequence: stop, also when it comes as the very last token that the limit allows."""
    url = server.url + CHAT
    for stream in (False, True):
        (cut,) = post_all(url, [ask("Count to one hundred", max_tokens=5, stream=stream)])
        assert cut.finish_reason == "length"
    (whole,) = post_all(url, [ask("Say hi.", max_tokens=100, stream=False)])
    assert whole.finish_reason == "stop"
    tokens = whole.usage["completion_tokens"]
    exact, short = post_all(url, [ask("Say hi.", max_tokens=count, stream=False) for count in (tokens, tokens - 1)])
    assert (exact.finish_reason, exact.text) == ("stop", whole.text)
    assert (short.finish_reason, short.text) == ("length", whole.text)


def test_b009_emoji_are_whole_alone_and_in_a_batch(server: Server) -> None:
    """The model is made to write emoji, each of several tokens, by the tokens that it may use."""
    emoji = "🌶🦜😀🎉🚀🌍🍎🐙"
    (tokens,) = post_all(server.url + "/tokenize", [{"model": "smol", "prompt": emoji}])
    bodies = [
        {
            **ask(f"Write emoji, number {at}.", max_tokens=24, temperature=1, seed=at),
            "allowed_token_ids": tokens.body["tokens"],
        }
        for at in range(4)
    ]
    alone = post_all(server.url + CHAT, bodies, at_once=False)
    together = post_all(server.url + CHAT, bodies)
    whole = post_all(server.url + CHAT, [{**body, "stream": False} for body in bodies])
    assert [answer.text for answer in alone] == [answer.text for answer in together]
    assert [answer.text for answer in alone] == [answer.text for answer in whole]
    assert any(not answer.text.isascii() for answer in alone)
    greedy = ask("Repeat exactly this text: 🌶🌶🌶🌶🌶🌶🌶🌶", max_tokens=40)
    (one,), many = post_all(server.url + CHAT, [greedy]), post_all(server.url + CHAT, [greedy] * 8)
    assert {answer.text for answer in many} == {one.text}


def test_b011_a_prompt_that_ends_inside_a_character_is_not_replayed(server: Server) -> None:
    (tokens,) = post_all(server.url + "/tokenize", [{"prompt": "Hello world 🌶", "add_special_tokens": False}])
    prompt = tokens.body["tokens"][:-1]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    streamed, whole = post_all(server.url + "/v1/completions", [{**body, "stream": True}, body])
    assert streamed.text == whole.text
    assert "Hello" not in whole.text
    (text,) = post_all(server.url + "/detokenize", [{"tokens": whole.body["choices"][0]["token_ids"]}])
    assert whole.text == text.body["prompt"]


def test_b007_included_stop_strings_on_every_path(server: Server) -> None:
    """Chat, text and token ids, streamed and whole: the text with the stop is that without, and the stop."""
    (tokens,) = post_all(server.url + "/tokenize", [{"prompt": "The sun is a star. The moon"}])
    prompts: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": "Name two rivers in one sentence each."}]}),
        ("/v1/completions", {"prompt": "The sun is a star. The moon"}),
        ("/v1/completions", {"prompt": tokens.body["tokens"]}),
    ]
    texts = []
    for path, prompt in prompts:
        body = {"model": "smol", **prompt, "max_tokens": 60, "temperature": 0, "stop": ["."]}
        bodies = [
            {**body, "include_stop_str_in_output": include, "stream": stream}
            for include in (True, False)
            for stream in (True, False)
        ]
        shown, shown_whole, hidden, hidden_whole = post_all(server.url + path, bodies)
        assert shown.text == shown_whole.text == hidden.text + "."
        assert hidden.text == hidden_whole.text
        assert "." not in hidden.text
        texts.append(hidden.text)
    assert texts[1] == texts[2]
