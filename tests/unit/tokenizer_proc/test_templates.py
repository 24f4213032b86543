"""Chat templates in their child process."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from ipc.messages import ChatMessage, ChatPrompt
from tests.unit.tokenizer_proc.vocabularies import CHATML
from tokenizer_proc.child_frames import Done, Refused
from tokenizer_proc.template_child import Render, Renderer, Setup, compile_template
from tokenizer_proc.templates import TemplateError, TemplateRenderer

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[3]
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ message['content'] | trim }}\n{% endfor %}{% if add_generation_prompt %}model:{% endif %}"
)
ENDLESS = (
    "{% if messages[0]['content'] == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0]['content'] }}{% if add_generation_prompt %}!{% endif %}"
)


def chat(*turns: tuple[str, str], **options: Any) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role, content) for role, content in turns), **options)


def with_renderer(
    template: str, work: Callable[[TemplateRenderer], Awaitable[T]], timeout: float = 20.0, **special: str
) -> T:
    async def run() -> T:
        renderer = TemplateRenderer(template, special, timeout)
        try:
            return await work(renderer)
        finally:
            await renderer.close()

    return uvloop.run(run())


def render(template: str, prompt: ChatPrompt, **special: str) -> str:
    return with_renderer(template, lambda renderer: renderer.render(prompt), **special)


def test_renders_with_and_without_the_generation_prompt() -> None:
    prompt = chat(("user", "Hi"))
    assert render(CHATML, prompt) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert render(CHATML, chat(("user", "Hi"), add_generation_prompt=False)) == "<|start|>user\nHi<|end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content | tojson }}]\n"
        "    {%- continue %}\n{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}"
        "{{ tools is none }}{{ strftime_now('%Y') | length }}",
    ],
)
def test_equals_transformers(template: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "system", "content": 'Say "é" <b>&</b>'},
        {"role": "user", "content": "line\n  two"},
        {"role": "assistant", "content": ""},
    ]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = utilities.render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True, **special
    )
    child = Renderer()
    assert child.answer(Setup(template, special, 10.0)) == Done("")
    assert child.answer(Render(messages, True)) == Done(expected)


@pytest.mark.parametrize(
    ("turns", "complaint"),
    [
        ([("system", "Be nice"), ("user", "Hi")], "System role not supported"),
        ([("user", "Hi"), ("user", "Hi")], "Conversation roles must alternate user/assistant"),
        ([("assistant", "Hi")], "Conversation roles must alternate user/assistant"),
    ],
)
def test_b056_the_templates_own_complaint_reaches_the_client(turns: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(NO_SYSTEM, chat(*turns))


@pytest.mark.parametrize("turns", [[("assistant", "Who?")], [("user", "Hi"), ("assistant", "I am")]])
def test_b057_a_last_assistant_message_is_followed_by_a_new_turn(turns: list[tuple[str, str]]) -> None:
    assert render(CHATML, chat(*turns)).endswith(f"{turns[-1][1]}<|end|>\n<|start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "last", "end"),
    [
        (CHATML, "The answer is ", "<|start|>assistant\nThe answer is "),
        # A template that strips messages leaves nothing of the trailing space.
        (NO_SYSTEM, "The answer is ", "\nThe answer is"),
        # The text also occurs earlier.
        (CHATML, "Hi", "<|start|>assistant\nHi"),
    ],
)
def test_continue_final_message(template: str, last: str, end: str) -> None:
    prompt = chat(("user", "Hi"), ("assistant", last), add_generation_prompt=False, continue_final_message=True)
    assert render(template, prompt).endswith(end)


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    prompt = chat(("user", "Hi"), ("assistant", "Hi"), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateError, match="final message"):
        render("{{ messages[0]['content'] }}", prompt)


def test_a_slow_template_is_killed_and_the_next_request_served() -> None:
    async def work(renderer: TemplateRenderer) -> tuple[int | None, int | None, str]:
        await renderer.start()
        first = renderer.child_pid
        with pytest.raises(TemplateError, match=r"took longer than 0\.5 s"):
            await renderer.render(chat(("user", "loop")))
        return first, renderer.child_pid, await renderer.render(chat(("user", "Hi")))

    first, second, text = with_renderer(ENDLESS, work, timeout=0.5)
    assert text == "Hi!"
    assert first is not None
    assert second is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_request_that_is_given_up_does_not_answer_the_next_one() -> None:
    async def work(renderer: TemplateRenderer) -> str:
        await renderer.start()
        given_up = asyncio.create_task(renderer.render(chat(("user", "loop"))))
        await asyncio.sleep(0.1)
        given_up.cancel()
        return await renderer.render(chat(("user", "Hi")))

    assert with_renderer(ENDLESS, work, timeout=0.5) == "Hi!"


def test_a_caller_that_gives_up_leaves_the_child_to_the_others() -> None:
    async def work(renderer: TemplateRenderer) -> None:
        await renderer.start()
        child = renderer.child_pid
        for rounds in range(20):
            # Cancelled before, while and after the child renders, with others behind it.
            long = "x" * 500_000
            given_up = asyncio.create_task(renderer.render(chat(("user", long))))
            others = [asyncio.create_task(renderer.render(chat(("user", str(at))))) for at in range(3)]
            await asyncio.sleep(0.0005 * rounds)
            given_up.cancel()
            others[1].cancel()
            results = await asyncio.gather(*others, return_exceptions=True)
            assert results[0] == "0!"
            assert results[1] == "1!" or isinstance(results[1], asyncio.CancelledError)
            assert results[2] == "2!"
            assert renderer.child_pid == child

    with_renderer(ENDLESS, work)


def test_closing_does_not_wait_for_a_rendering() -> None:
    async def work(renderer: TemplateRenderer) -> tuple[int | None, object]:
        await renderer.start()
        child = renderer.child_pid
        rendering = asyncio.create_task(renderer.render(chat(("user", "loop"))))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):  # the rendering's own limit is far longer
            await renderer.close()
        (result,) = await asyncio.gather(rendering, return_exceptions=True)
        return child, result

    child, result = with_renderer(ENDLESS, work, timeout=600.0)
    assert isinstance(result, asyncio.CancelledError)
    assert child is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_killed_child_is_replaced() -> None:
    async def work(renderer: TemplateRenderer) -> list[str]:
        texts = []
        for pause in (0.0, 0.2):  # before the loop has noticed the death, and after
            await renderer.start()
            assert renderer.child_pid is not None
            os.kill(renderer.child_pid, signal.SIGKILL)
            await asyncio.sleep(pause)
            texts.append(await renderer.render(chat(("user", "Hi"))))
        return texts

    assert with_renderer(ENDLESS, work) == ["Hi!", "Hi!"]


def test_many_requests_at_once_keep_their_own_answers() -> None:
    async def work(renderer: TemplateRenderer) -> list[str]:
        return await asyncio.gather(*(renderer.render(chat(("user", str(i)))) for i in range(50)))

    assert with_renderer(ENDLESS, work) == [f"{i}!" for i in range(50)]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' * 2000000000 }}", "too much memory"),
        ("{% for a in range(5000) %}{{ 'a' * 1000 }}{% endfor %}", "longer than"),
        ("{{ messages[0].nothing.at.all }}", "the chat template failed"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "nests too deep"),
    ],
)
def test_a_bad_template_fails_the_request_alone(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(template, chat(("user", "Hi")))


def test_a_template_that_does_not_compile_is_told_at_start() -> None:
    async def work(renderer: TemplateRenderer) -> None:
        with pytest.raises(TemplateError, match="the chat template failed"):
            await renderer.start()
        with pytest.raises(TemplateError):
            await renderer.render(chat(("user", "Hi")))

    with_renderer("{% if %}", work)


def test_b060_warns_when_the_generation_prompt_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tokenizer_proc.templates"):
        assert with_renderer(CHATML, lambda renderer: renderer.check_generation_prompt())
        assert not caplog.records
        ignores = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert not with_renderer(ignores, lambda renderer: renderer.check_generation_prompt())
    assert "ignores add_generation_prompt" in caplog.text


def test_the_child_ends_with_its_parent() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tokenizer_proc.template_child"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.communicate(timeout=60)  # closes stdin
    assert child.returncode == 0


def test_the_sandbox_has_no_way_to_files() -> None:
    with pytest.raises(Exception, match="no loader"):
        compile_template("{% include '/etc/passwd' %}").render()


def test_child_answers_before_setup_without_dying() -> None:
    assert isinstance(Renderer().answer(Render([], True)), Refused)
