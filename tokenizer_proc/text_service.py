"""Answers to `Tokenize` and `Detokenize`, which need the vocabulary and nothing of the engine behind."""

import asyncio
from collections.abc import Callable

from ipc.codec import pack_ints, unpack_ints
from ipc.messages import Detokenize, Detokenized, Failed, ModelInfo, Outputs, ToClient, Tokenize, Tokenized
from ipc.validation import validate_detokenize, validate_tokenize

from .encoding import PromptEncoder
from .failures import explained, failed
from .vocabulary import Vocabulary


class TextService:
    """All methods belong to one event loop; the work is done off it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: PromptEncoder,
        model: ModelInfo,
        max_waiting: int,
        to_client: Callable[[bytes, ToClient], bool],
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._model = model
        self._max_waiting = max_waiting
        self._to_client = to_client
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, peer: bytes, message: Tokenize | Detokenize) -> None:
        """Begin to answer one message of a client."""
        if len(self._tasks) >= self._max_waiting:
            reason = "too many texts are waiting to be tokenized"
            self._refuse(peer, failed(message.request_id, 429, reason, code="queue_full"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(peer, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: bytes, message: Tokenize | Detokenize) -> None:
        try:
            answer = await (self._tokenize(message) if isinstance(message, Tokenize) else self._detokenize(message))
        except Exception as error:
            self._refuse(peer, explained(message.request_id, error))
        else:
            self._to_client(peer, answer)

    async def _tokenize(self, message: Tokenize) -> Tokenized:
        validate_tokenize(message, self._model)
        token_ids = await self._encoder.tokenize(message.prompt, add_special_tokens=message.add_special_tokens)
        spelled: tuple[str, ...] = ()
        if message.return_token_strs:
            spelled = tuple(self._vocabulary.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids)
        return Tokenized(message.request_id, pack_ints(token_ids), spelled)

    async def _detokenize(self, message: Detokenize) -> Detokenized:
        validate_detokenize(message, self._model)
        return Detokenized(message.request_id, await self._encoder.detokenize(unpack_ints(message.token_ids)))

    def _refuse(self, peer: bytes, answer: Failed) -> None:
        self._to_client(peer, Outputs((answer,)))
