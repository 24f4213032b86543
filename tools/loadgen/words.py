"""Words that are one token each for the server's tokenizer, so that texts of them have an exact length.

The server is asked: what it counts for a text (`usage.prompt_tokens`) is the only count that matters. Byte-pair and
unigram vocabularies split text at spaces before anything else, so that tokens of words behind each other just add up.
"""

from collections.abc import Awaitable, Callable, Sequence

# Frequent English words; a vocabulary of some ten thousand tokens has nearly all of them as one.
_FREQUENT = (
    "the time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan "
    "college interest death experience effect use class control field development role effort rate heart drug show "
    "leader light voice wife whole police mind return report decision view"
)
CANDIDATES = tuple(_FREQUENT.split())
_FEWEST = 16  # words; with fewer, different blocks would be too much alike

Count = Callable[[str], Awaitable[int]]  # tokens of a prompt with this text, with what the server adds


class WordsError(Exception):
    """No texts of exact length can be made; the text is one line for the user."""


async def single_token_words(count: Count, candidates: Sequence[str] = CANDIDATES) -> tuple[list[str], int]:
    """Those that are one token, the first of which begins every text, and how many tokens the server adds to a text.

    Raises `WordsError`, and whatever `count` raises.
    """
    first = candidates[0]
    alone = await count(first)
    if await count(f"{first} {first}") != alone + 1:
        raise WordsError(f"the server's tokenizer splits even {first!r}: use --api tokens")

    async def checked(words: Sequence[str]) -> list[str]:
        if await count(" ".join([first, *words])) == alone + len(words):
            return list(words)
        if len(words) == 1:
            return []
        middle = len(words) // 2
        return await checked(words[:middle]) + await checked(words[middle:])

    words = [first, *await checked(candidates[1:])]
    if len(words) < _FEWEST:
        raise WordsError(f"only {len(words)} words are one token for the server's tokenizer: use --api tokens")
    return words, alone - 1
