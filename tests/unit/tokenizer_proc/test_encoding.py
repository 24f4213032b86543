"""Prompts to token ids."""

import asyncio
import copy

import pytest

from ipc.messages import ChatMessage, ChatPrompt, TextPrompt
from ipc.validation import InvalidRequest
from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary
from tokenizer_proc.encoding import PromptEncoder
from tokenizer_proc.templates import TemplateRenderer

VOCABULARY = byte_level_vocabulary()
HELLO = VOCABULARY.encode("hello", add_special_tokens=False)[0]
CHAT = ChatPrompt((ChatMessage("user", "Hi"),))


def test_chat_is_rendered_and_long_text_encoded_in_a_thread() -> None:
    async def run() -> None:
        assert VOCABULARY.chat_template is not None
        encoder = PromptEncoder(VOCABULARY, TemplateRenderer(VOCABULARY.chat_template, {}, 20.0), 4000)
        chat = await encoder.encode(CHAT)
        assert VOCABULARY.tokenizer.decode(list(chat), skip_special_tokens=False) == (
            "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
        )
        long = TextPrompt("hello" * 1000)
        assert encoder.encode_now(long) is None
        assert list(await encoder.encode(long)) == [HELLO] * 1000
        assert encoder.encode_now(TextPrompt("hello")) is not None
        assert (encoder.prompts, encoder.renders) == (3, 1)
        assert encoder.encode_seconds > 0
        assert encoder.encode_wait_seconds > 0  # for the one on a thread
        assert encoder.render_seconds > encoder.encode_seconds / 1000
        await encoder.close()

    asyncio.run(run())


def test_a_hopelessly_long_text_is_refused_without_encoding_it() -> None:
    async def run() -> None:
        def encode(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was encoded")

        vocabulary = copy.copy(VOCABULARY)
        vocabulary.encode = encode  # type: ignore[method-assign]
        longest = max(len(token) for token in VOCABULARY.tokenizer.get_vocab())
        assert VOCABULARY.chat_template is not None
        encoder = PromptEncoder(vocabulary, TemplateRenderer(VOCABULARY.chat_template, {}, 20.0), 500)
        text = "hello" * (500 * longest // 5 + 1)
        for prompt, name in ((TextPrompt(text), "prompt"), (ChatPrompt((ChatMessage("user", text),)), "messages")):
            with pytest.raises(
                InvalidRequest, match=f"^{name}: the prompt has at least 50[0-9] tokens.* at most 500$"
            ) as caught:
                await encoder.encode(prompt)
            assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")
        await encoder.close()

    asyncio.run(run())
