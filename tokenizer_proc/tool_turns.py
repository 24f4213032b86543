"""Tools for chat templates that know nothing of them: described in the system message, calls and results as text.

The form is that of the Hermes models (github.com/NousResearch/Hermes-Function-Calling): signatures within `<tools>`,
each call a JSON object within `<tool_call>`, each result within `<tool_response>` in a turn of the user.
"""

import json
from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]

_HOW = (
    "You may call functions to help with the request. These are their signatures, one JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, answer with a JSON object that has its name and its arguments, within tool_call tags:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{...}}}}\n</tool_call>'
)


def as_plain_turns(turns: Sequence[Turn], tools: list[Any] | None, *, system_role: bool) -> list[Turn]:
    """The conversation in turns of system, user and assistant alone; `turns` as chat templates see them.

    Without a system role the description stands before the first turn of the user.
    """
    plain: list[Turn] = []
    behind_result = False  # whether the last turn is one of tool results
    for turn in turns:
        if turn["role"] == "tool":
            text = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if behind_result:
                plain[-1]["content"] += "\n" + text
            else:
                plain.append({"role": "user", "content": text})
            behind_result = True
            continue
        behind_result = False
        calls = turn.get("tool_calls", ())
        turn = {name: value for name, value in turn.items() if name != "tool_calls"}
        for call in calls:
            text = json.dumps(call["function"], ensure_ascii=False)
            before = "\n" if turn["content"] else ""
            turn["content"] += f"{before}<tool_call>\n{text}\n</tool_call>"
        plain.append(turn)
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        _put_first(plain, _HOW.format(tools=lines), "system" if system_role else "user")
    return plain


def _put_first(turns: list[Turn], text: str, role: str) -> None:
    if turns and turns[0]["role"] == role:
        first, second = (turns[0]["content"], text) if role == "system" else (text, turns[0]["content"])
        turns[0] = {**turns[0], "content": f"{first}\n\n{second}" if first else second}
    else:
        turns.insert(0, {"role": role, "content": text})
