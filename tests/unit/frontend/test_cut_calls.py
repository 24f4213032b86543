"""Calls that a limit, a stop or a loop cut, in all APIs, streamed and whole: no markup is shown as text."""

import json
from typing import Any

import pytest

from frontend.generation import Batch
from frontend.messages_api.render import MessagesRenderer
from frontend.parsed_responses import ParsedChatResponder
from frontend.parsers import Enforced, OutputFormat
from frontend.requests import Job
from frontend.responses_api.protocol import responses_decoder
from frontend.responses_api.render import ResponsesRenderer
from frontend.translation import Names
from ipc.codec import pack_ints
from ipc.messages import Delta, Finished, FinishReason, SamplingParams, TextPrompt
from tests.unit.frontend.outputs import USAGE, events_of

ARGUMENTS = '{"city": "Köln"}'
OUTPUTS = {  # as the grammars of `tool_choice` make them, two calls each
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "g", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {ARGUMENTS}}}]',
    "mistral named": f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{ARGUMENTS}",
}
REASONS: list[tuple[FinishReason, str | None]] = [("length", None), ("stop", "END"), ("stop", "repetition_loop")]


def job(form: str, enforced: Enforced = "output") -> Job:
    output_format = OutputFormat(form.split()[0], ("f", "g"), "", None, enforced)
    return Job((TextPrompt("p"),), SamplingParams(stop=("END",)), "m", True, False, output_format=output_format)


def batches(text: str, reason: FinishReason, stop_reason: str | None) -> list[Batch]:
    """A delta for each 13 characters; how a text is split has its own tests."""
    parts = [text[at : at + 13] for at in range(0, len(text), 13)]
    found: list[Batch] = [[(0, Delta(1, 0, part, pack_ints([1]), prompt_tokens=10))] for part in parts]
    return [*found, [(0, Finished(1, 0, reason, stop_reason, 10, 6, 4))]]


def chat(job: Job, arrived: list[Batch]) -> tuple[str, list[str], str]:
    """Text, arguments of the calls, and the reason of the end, the same whole and streamed."""
    choice = json.loads(ParsedChatResponder(job, "fp").whole(arrived, USAGE))["choices"][0]
    message = choice["message"]
    whole = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    responder = ParsedChatResponder(job, "fp")
    data = b"".join(responder.chunks(batch) for batch in arrived).decode()
    chunks = [json.loads(part.removeprefix("data: "))["choices"][0] for part in data.split("\n\n") if part]
    streamed: list[str] = []
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", ()):
            streamed += [""] if "id" in call else []
            streamed[call["index"]] += call["function"]["arguments"]
    text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert (text, streamed) == (message["content"] or "", whole)
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    return text, whole, choice["finish_reason"]


def messages(job: Job, arrived: list[Batch]) -> tuple[str, int, str]:
    """Text, number of calls and reason of the end."""
    make = lambda: MessagesRenderer(job, Names({}), job.output_format.parser())  # noqa: E731
    whole = json.loads(make().whole(arrived, USAGE))
    renderer = make()
    events = events_of(b"".join(renderer.chunks(batch) for batch in arrived) + renderer.end(USAGE))
    text = "".join(block.get("text", "") for block in whole["content"])
    changes = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert text == "".join(change.get("text", "") for change in changes)
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    return text, sum(block["type"] == "tool_use" for block in whole["content"]), whole["stop_reason"]


def responses(job: Job, arrived: list[Batch]) -> tuple[str, list[dict[str, Any]], str]:
    """Text, the calls, and the status."""
    body = responses_decoder.decode(b'{"model": "m", "input": "x"}')
    make = lambda: ResponsesRenderer(job, body, Names({}), job.output_format.parser())  # noqa: E731
    whole = json.loads(make().whole(arrived, USAGE))
    renderer = make()
    events = events_of(b"".join(renderer.chunks(batch) for batch in arrived) + renderer.end(USAGE))
    text = "".join(part["text"] for item in whole["output"] for part in item.get("content", ()))
    assert text == "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["response"]["status"] == whole["status"]
    return text, [item for item in whole["output"] if item["type"] == "function_call"], whole["status"]


@pytest.mark.parametrize(("reason", "stop_reason"), REASONS)
@pytest.mark.parametrize("form", OUTPUTS)
def test_a_demanded_call_that_is_cut_anywhere_is_no_text(
    form: str, reason: FinishReason, stop_reason: str | None
) -> None:
    output = OUTPUTS[form]
    for cut in range(0, len(output), 1 if reason == "length" else 5):  # where it is cut does not depend on why
        arrived = batches(output[:cut], reason, stop_reason)
        text, calls, ended = chat(job(form), arrived)
        assert text == ""
        assert all(ARGUMENTS.startswith(arguments) for arguments in calls)
        callable_now = bool(calls) and calls[-1] == ARGUMENTS
        assert ended == ("length" if reason == "length" else "tool_calls" if callable_now else "stop")

        text, count, ended = messages(job(form), arrived)
        assert (text, count) == ("", len(calls))
        by_stop = "stop_sequence" if stop_reason == "END" else "tool_use" if callable_now else "end_turn"
        assert ended == ("max_tokens" if reason == "length" else by_stop)

        text, items, ended = responses(job(form), arrived)
        assert (text, [item["arguments"] for item in items]) == ("", calls)
        assert ended == ("incomplete" if reason == "length" else "completed")
        for item in items:
            whole = item["arguments"] == ARGUMENTS
            assert whole or item["status"] == "incomplete"


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral named"])
def test_a_strict_call_that_is_cut_is_no_text_either(form: str) -> None:
    """Text before it stays; a part of the opening mark may be text, so it is shown as such."""
    output = OUTPUTS[form]
    opening = output.index(">" if form == "hermes" else "]") + 1
    for cut in range(opening, len(output)):
        arrived = batches("One moment. " + output[:cut], "length", None)
        for api in (chat, messages, responses):
            text = api(job(form, "calls"), arrived)[0]
            assert "".join(text.split()) in ("Onemoment.", "Onemoment." + _begun(output[opening:cut]))


def _begun(output: str) -> str:
    """The part of a second opening mark at the end of an output."""
    ends = (output[at:] for at in range(len(output)))
    marks = ("<tool_call>", "[TOOL_CALLS]")
    return next((end for end in ends if any(mark.startswith(end) and mark != end for mark in marks)), "")


def test_markup_that_nobody_enforces_stays_text() -> None:
    arrived = batches('<tool_call>{"na', "length", None)
    for api in (chat, messages, responses):
        assert api(job("hermes", ""), arrived)[0] == '<tool_call>{"na'
