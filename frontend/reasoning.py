"""What requests say of reasoning, in the words of chat templates."""

from typing import Any

from ipc.messages import ModelInfo


def thinking_kwargs(model: ModelInfo, think: bool, effort: str | None = None) -> dict[str, Any]:
    """Names for the chat template of a model that can think; nothing for others."""
    wanted = {"enable_thinking": think, "reasoning_effort": effort if think else None}
    if not model.reasoning_format:
        return {}
    return {name: value for name, value in wanted.items() if value is not None and name in model.template_kwargs}
