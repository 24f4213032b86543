"""How a model writes tool calls and reasoning: told by the server's settings, or by the chat template's text."""

from config.markup import HERMES_OPENING, LLAMA3_TAG, MISTRAL_OPENING, REASONING_CLOSING, REASONING_OPENING

_TOOL_MARKS = (  # the first that occurs in a template; a name is that of a parser in `frontend.parsers`
    (MISTRAL_OPENING, "mistral"),
    (HERMES_OPENING, "hermes"),
    (LLAMA3_TAG, "llama3_json"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
)
# XML inside of <tool_call>, which is another format than Hermes': Qwen3-Coder, GLM-4.5.
_OTHER_MARKS = ("<function=", "<arg_key>")
_REASONING_MARKS = (REASONING_OPENING, REASONING_CLOSING)


def tool_format(setting: str, template: str, *, shows_tools: bool) -> tuple[str, str]:
    """Name of the format, empty for none, and why. `shows_tools`: whether the template shows a request's tools."""
    if setting == "none":
        return "", "tools are off (--tool-parser none)"
    if not shows_tools:
        why = "the chat template does not show tools, so they are described in the system message"
        if setting not in ("auto", "hermes"):
            why += f"; --tool-parser {setting} cannot be used"
        return "hermes", f"tool calls: hermes ({why})"
    if setting != "auto":
        return setting, f"tool calls: {setting} (--tool-parser)"
    if not any(mark in template for mark in _OTHER_MARKS):
        for mark, name in _TOOL_MARKS:
            if mark in template:
                return name, f"tool calls: {name} (the chat template has {mark})"
    return "", "tool calls: the chat template shows tools in a form that is not known; set --tool-parser to try one"


def reasoning_format(setting: str, template: str) -> tuple[str, str]:
    """Name of the format, empty for none, and why."""
    if setting == "none":
        return "", "reasoning is part of the text (--reasoning-parser none)"
    if setting != "auto":
        return setting, f"reasoning: {setting} (--reasoning-parser)"
    if any(mark in template for mark in _REASONING_MARKS):
        return "think", f"reasoning: think (the chat template has {REASONING_OPENING} or its end)"
    return "", "reasoning: none (the chat template marks none)"
