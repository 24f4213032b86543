"""What a chat request says about tools: what the template shows, how the output is read, and what it must be."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ipc.messages import Grammar, ModelInfo
from ipc.validation import MAX_GRAMMAR_BYTES

from . import protocol
from .errors import ApiError
from .parsers import OutputFormat, call_parser
from .parsers.grammar import ANY_ARGUMENTS, arguments_name, arguments_rule

if TYPE_CHECKING:
    from .requests import Job

MOST_FORCED_CALLS = 8  # small models do not find an end by themselves


class ToolRequest(Struct, frozen=True):
    """The meaning of `tools`, `tool_choice` and `parallel_tool_calls`."""

    shown: bytes = b""  # JSON for the chat template; empty: no tools
    output_format: OutputFormat = OutputFormat()
    grammar: Grammar | None = None
    shown_special_tokens: tuple[str, ...] = ()
    renamed: dict[str, str] = {}  # of the tools that are shown, to where the request has them

    def apply(self, job: "Job") -> "Job":
        """The same job with these tools."""
        output_format = self.output_format
        if output_format.enforced == "output" and job.params.grammar is not None:
            raise ApiError(400, "tool_choice demands a call, which excludes any other format", param="tool_choice")
        if job.params.grammar is not None:
            # All of the output matches the grammar, also where the template has opened a place for reasoning.
            output_format = msgspec.structs.replace(output_format, reasoning="", enforced="")
        params = msgspec.structs.replace(job.params, shown_special_tokens=self.shown_special_tokens)
        job = msgspec.structs.replace(job, params=params, output_format=output_format)
        if self.grammar is None or params.grammar is not None:
            return job
        params = msgspec.structs.replace(params, grammar=self.grammar)
        return msgspec.structs.replace(job, params=params, renamed={**job.renamed, "grammar": "tools"})


def tool_request(body: protocol.ChatRequest, model: ModelInfo) -> ToolRequest:
    """The tools of a chat request; `ApiError` naming the parameter for what cannot be."""
    if body.functions:
        raise ApiError(400, "functions is deprecated: use tools instead", param="functions")
    if body.function_call not in (None, "none"):
        raise ApiError(400, "function_call is deprecated: use tool_choice instead", param="function_call")
    if not body.tools:
        if body.tool_choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return _without_tools(model)
    if body.tool_choice == "none":
        return _without_tools(model)
    functions = [_function(at, tool) for at, tool in enumerate(body.tools)]
    if not model.tool_format:
        message = "tools: it is not known how this model writes tool calls (the server's --tool-parser says it)"
        raise ApiError(400, message, param="tools")
    choice: str | protocol.ToolChoice | None = body.tool_choice
    renamed: dict[str, str] = {}
    if isinstance(choice, protocol.ToolChoice) and choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            where = "tool_choice.allowed_tools"
            raise ApiError(400, f"{where} is required", param=where)
        allowed = _allowed(choice.allowed_tools, functions)
        functions = [functions[index] for index in allowed]
        choice, renamed = choice.allowed_tools.mode, _places(allowed)
    called = _demanded(choice, functions)
    most = None if body.parallel_tool_calls in (None, True) else 1
    if isinstance(choice, protocol.ToolChoice):
        most = 1
    # A call that is demanded comes at once, without reasoning.
    names = tuple(function.name for function in functions)
    reasoning = "" if called else model.reasoning_format
    output_format = OutputFormat(model.tool_format, names, reasoning, most, "output" if called else "")
    special = _special(output_format, model)
    grammar = None
    if called:
        grammar = _grammar(called, names, most or MOST_FORCED_CALLS, model)
    elif any(function.strict for function in functions) and _can_be_strict(output_format):
        output_format = msgspec.structs.replace(output_format, enforced="calls")
        grammar = _strict_grammar(functions, output_format, special, model)
    shown = msgspec.json.encode([_shown(function) for function in functions])
    return ToolRequest(shown, output_format, grammar, special, renamed)


def _without_tools(model: ModelInfo) -> ToolRequest:
    output_format = OutputFormat(reasoning=model.reasoning_format)
    return ToolRequest(output_format=output_format, shown_special_tokens=_special(output_format, model))


def _special(output_format: OutputFormat, model: ModelInfo) -> tuple[str, ...]:
    return tuple(text for text in output_format.markup() if text in model.special_tokens)


def _function(at: int, tool: protocol.Tool) -> protocol.FunctionDefinition:
    if tool.type != "function":
        message = f"tools[{at}].type must be function: tools of type {tool.type[:64]!r} are not supported"
        raise ApiError(400, message, param=f"tools[{at}].type")
    if tool.function is None:
        raise ApiError(400, f"tools[{at}].function is required", param=f"tools[{at}].function")
    return tool.function


def _shown(function: protocol.FunctionDefinition) -> dict[str, object]:
    """As transformers describes a function to a template, where all of this is always there but the description."""
    shown = protocol.FunctionDefinition(
        function.name, function.description, function.parameters or {"type": "object", "properties": {}}
    )
    return {"type": "function", "function": shown}


def allowed_indices(allowed: Sequence[str | None], tools: Sequence[str | None], where: str) -> list[int]:
    """Indices of the `tools` (names) that `tool_choice` allows; `ApiError` naming `where`, its list, for a bad one."""
    if not allowed:
        problem = f'{where} must name at least one of tools (tool_choice "none" is for no call at all)'
        raise ApiError(400, problem, param=where)
    if unknown := set(allowed) - set(tools):
        name = min(str(name) for name in unknown)[:64]
        raise ApiError(400, f"{where}: {name!r} is not one of tools", param=where)
    return [index for index, name in enumerate(tools) if name in allowed]


def _allowed(choice: protocol.AllowedTools, functions: Sequence[protocol.FunctionDefinition]) -> list[int]:
    where = "tool_choice.allowed_tools.tools"
    names = []
    for at, tool in enumerate(choice.tools or ()):
        if tool.type != "function":
            problem = f"{where}[{at}].type must be function, not {tool.type[:64]!r}"
            raise ApiError(400, problem, param=f"{where}[{at}].type")
        if tool.function is None:
            raise ApiError(400, f"{where}[{at}].function is required", param=f"{where}[{at}].function")
        names.append(tool.function.name)
    return allowed_indices(names, [function.name for function in functions], where)


def _places(indices: Sequence[int]) -> dict[str, str]:
    """What errors are about, of the tools that are shown, and where the request has it."""
    return {
        f"tools[{at}]{part}": f"tools[{index}]{part}"
        for at, index in enumerate(indices)
        for part in ("", ".function.name", ".function.parameters")
    }


def _demanded(
    choice: str | protocol.ToolChoice | None, functions: Sequence[protocol.FunctionDefinition]
) -> list[protocol.FunctionDefinition]:
    """The functions of which one must be called; none when the model decides."""
    if choice is None or choice == "auto":
        return []
    if choice == "required":
        return list(functions)
    if isinstance(choice, str):
        message = f"tool_choice must be auto, none, required or a function, not {choice[:64]!r}"
        raise ApiError(400, message, param="tool_choice")
    if choice.type != "function" or choice.function is None:
        message = (
            'tool_choice as an object must be {"type": "function", "function": {"name": ...}} or of type allowed_tools'
        )
        raise ApiError(400, message, param="tool_choice")
    name = choice.function.name
    found = [function for function in functions if function.name == name]
    if not found:
        raise ApiError(400, f"tool_choice: tools has no function {name[:64]!r}", param="tool_choice.function.name")
    return found


def _grammar(
    called: Sequence[protocol.FunctionDefinition], names: Sequence[str], most: int, model: ModelInfo
) -> Grammar:
    """The grammar of 1 to `most` calls; `names` are those of all functions."""
    rules = {function.name: arguments_rule(function.parameters) for function in called}
    source = call_parser(model.tool_format).grammar(rules, model.special_tokens, most=most)
    return _as_grammar(source, called, names)


def _can_be_strict(output_format: OutputFormat) -> bool:
    """Where calls are told by standing at the beginning, it must be known where that is."""
    return not output_format.reasoning or call_parser(output_format.tools).marked


def _strict_grammar(
    functions: Sequence[protocol.FunctionDefinition],
    output_format: OutputFormat,
    special: tuple[str, ...],
    model: ModelInfo,
) -> Grammar:
    """The grammar of an output that may have calls; only those of strict functions need arguments of their schema."""
    rules = {
        function.name: arguments_rule(function.parameters) if function.strict else ANY_ARGUMENTS
        for function in functions
    }
    parser = call_parser(output_format.tools)
    marks = [text for text in special if text not in parser.markup]
    source = parser.free_grammar(rules, model.special_tokens, most=output_format.most_calls, marks=marks)
    return _as_grammar(source, functions, output_format.names)


def _as_grammar(source: str, called: Sequence[protocol.FunctionDefinition], names: Sequence[str]) -> Grammar:
    """A grammar that knows which function's `parameters` its lines are made from."""
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = (
            f"tools: a grammar of their parameters has {size} bytes, but at most {MAX_GRAMMAR_BYTES} can be enforced, "
            "as strict functions and demanded calls need it"
        )
        raise ApiError(400, message, param="tools")
    places = {
        f"{arguments_name(at)}:": f"tools[{names.index(function.name)}].function.parameters"
        for at, function in enumerate(called)
    }
    found = ((number, places.get(line.partition(" ")[0])) for number, line in enumerate(source.split("\n"), 1))
    return Grammar("lark", source, {number: place for number, place in found if place is not None})
