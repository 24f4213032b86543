"""Several prompts in one body: whether the engine can ever queue them all, found out before the first is sent.

Sent one by one, those that find the queue full would get a 429, and the whole body would be tried again for ever.
"""

from collections.abc import Sequence

from ipc.engine_client import EngineClient
from ipc.errors import RequestFailed
from ipc.messages import ChatPrompt, TextPrompt, TokenPrompt
from ipc.validation import MAX_PROMPT_LOGPROBS, MAX_TOKENIZE_BYTES, InvalidRequest, validate_together

from .errors import ApiError

_SPECIALS = 8  # tokens that a text may have beside one for each byte


async def check_together(
    client: EngineClient,
    prompts: Sequence[TextPrompt | ChatPrompt | TokenPrompt],
    n: int,
    name: str,
    prompt_logprobs: int | None = None,
) -> None:
    """Raise `ApiError` 400, naming `name`, when they would not all fit an empty queue."""
    model = client.model
    if len(prompts) < 2 or model is None:
        return
    least = [len(prompt.token_ids) // 4 if isinstance(prompt, TokenPrompt) else 1 for prompt in prompts]
    most = [
        min(model.max_model_len, len(prompt.text.encode()) + _SPECIALS) if isinstance(prompt, TextPrompt) else count
        for prompt, count in zip(prompts, least, strict=True)
    ]
    try:
        validate_together(least, n, model, name, prompt_logprobs)
        listed = 0 if prompt_logprobs is None else prompt_logprobs + 1
        # Else it cannot matter how long the texts are.
        if sum(most) * n > model.max_queue_tokens or sum(most) * n * listed > MAX_PROMPT_LOGPROBS:
            validate_together([await _count(client, prompt) for prompt in prompts], n, model, name, prompt_logprobs)
    except InvalidRequest as error:
        raise ApiError.of_invalid(error) from None


async def _count(client: EngineClient, prompt: TextPrompt | ChatPrompt | TokenPrompt) -> int:
    """Tokens of a prompt; 1 for one that is refused anyhow, which its own request then says best."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids) // 4
    if isinstance(prompt, TextPrompt) and len(prompt.text.encode()) > MAX_TOKENIZE_BYTES:
        return 1
    try:
        return len((await client.tokenize(prompt)).token_ids) // 4
    except RequestFailed:
        return 1
