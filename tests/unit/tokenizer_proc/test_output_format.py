"""How a model writes calls and reasoning, as told by its chat template."""

from collections.abc import Sequence

import msgspec
import pytest

from ipc.codec import pack_ints
from ipc.engine_messages import RowOutput
from ipc.messages import ChatMessage, ChatPrompt, Delta, Outputs, SamplingParams, TextPrompt
from tests.unit.tokenizer_proc.test_service import MODEL, Bench
from tests.unit.tokenizer_proc.vocabularies import CHATML, byte_level_vocabulary
from tokenizer_proc.choice import Choice, Preparation
from tokenizer_proc.encoding import Prompt, PromptEncoder
from tokenizer_proc.output_format import reasoning_format, tool_format

# What stands in the templates of Qwen2.5, Hermes 3; Llama 3.1 and 3.2; Mistral 7B v0.3, Nemo; Qwen3-Coder, GLM-4.5.
KNOWN = [
    ("within <tool_call></tool_call> XML tags:\\n<tool_call>\\n", "hermes"),
    (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        "llama3_json",
    ),
    ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
    ('{{- "[TOOL_CALLS] [" }}', "mistral"),
    ("<tool_call>\\n<function=example>", ""),
    ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", ""),
    ("{{ tools }}", ""),
]


@pytest.mark.parametrize(("template", "name"), KNOWN)
def test_auto_takes_it_from_the_template(template: str, name: str) -> None:
    found, why = tool_format("auto", template, shows_tools=True)
    assert found == name
    assert (name or "--tool-parser") in why


def test_settings_win_where_they_can() -> None:
    assert tool_format("none", "[TOOL_CALLS]", shows_tools=True)[0] == ""
    assert tool_format("hermes", "[TOOL_CALLS]", shows_tools=True)[0] == "hermes"
    assert tool_format("auto", CHATML, shows_tools=False)[0] == "hermes"
    found, why = tool_format("mistral", CHATML, shows_tools=False)
    assert found == "hermes"
    assert "--tool-parser mistral cannot be used" in why


def test_reasoning() -> None:
    assert reasoning_format("auto", "{% if '</think>' in content %}")[0] == "think"
    assert reasoning_format("auto", CHATML)[0] == ""
    assert reasoning_format("think", CHATML)[0] == "think"
    assert reasoning_format("none", "<think>")[0] == ""


def test_special_tokens_are_shown_one_by_one() -> None:
    vocabulary = byte_level_vocabulary()
    ids = vocabulary.special_token_ids()
    assert set(ids) == {"<|start|>", "<|end|>"}
    tokens = [ids["<|start|>"], *vocabulary.encode("hello", add_special_tokens=False), ids["<|end|>"]]

    def text(params: SamplingParams) -> str:
        choice = Choice(1, 0, [1], params, vocabulary, Preparation(0.0, 0.0, 0.0), in_reasoning=True)
        deltas = [choice.take_plain(token).delta for token in tokens]
        deltas.append(choice.take(RowOutput(1, pack_ints([]), "length")).delta)
        assert all(delta.in_reasoning for delta in deltas if delta)
        return "".join(delta.text for delta in deltas if delta)

    assert text(SamplingParams()) == "hello"
    assert text(SamplingParams(shown_special_tokens=("<|start|>", "<unknown>"))) == "<|start|>hello"
    assert text(SamplingParams(skip_special_tokens=False)) == "<|start|>hello<|end|>"


class RenderedAs(PromptEncoder):
    """Every chat renders to one text, at once."""

    def __init__(self, text: str) -> None:
        super().__init__(byte_level_vocabulary(), None, MODEL.max_model_len)
        self._text = text

    def encode_now(self, prompt: Prompt) -> Sequence[int]:
        text = self._text if isinstance(prompt, ChatPrompt) else "hello <think>"
        return byte_level_vocabulary().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("rendered", "format_name", "opened"),
    [
        ("hello<|start|><think>\n", "think", True),
        ("hello<think>", "think", True),
        ("hello<think>\n\n</think>\n\n", "think", False),
        ("hello<|start|>", "think", False),
        ("hello<think>\n", "", False),
    ],
)
def test_deltas_tell_whether_the_prompt_has_opened_the_reasoning(rendered: str, format_name: str, opened: bool) -> None:
    model = msgspec.structs.replace(MODEL, reasoning_format=format_name)
    bench = Bench(encoder=RenderedAs(rendered), model=model)
    for request_id, prompt in ((1, ChatPrompt((ChatMessage("user", "hi"),))), (2, TextPrompt("a <think>"))):
        bench.generate(request_id, prompt)
    token = byte_level_vocabulary().encode("hello", add_special_tokens=False)[0]
    bench.step(plain=[(1, token), (2, token)])
    deltas = [
        item for _, sent in bench.sent if isinstance(sent, Outputs) for item in sent.items if isinstance(item, Delta)
    ]
    assert [(delta.request_id, delta.in_reasoning) for delta in deltas] == [(1, opened), (2, False)]
