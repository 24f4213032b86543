"""Server-sent events as OpenAI's protocol has them: one `data:` line each."""

from collections.abc import AsyncIterable, AsyncIterator


async def data_lines(body: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """What follows `data:`, however the body is cut; the lines of one list have come at the same time."""
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if found:
            yield found
