"""The console in a real browser, on the real model."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.browser import CHROMIUM, Page, browser
from tests.e2e.server import SMALL, Server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]

PIXELS = "document.querySelectorAll('canvas')[{}].toDataURL()"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


async def stream(url: str) -> None:
    """A request that runs until it is cancelled, or for a long time."""
    request = {"model": "smol", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=request) as response:
        async for _ in response.content:
            pass


async def look(server: Server, page: Page) -> None:
    await page.open(server.url, scheme="light")
    await page.until("document.getElementById('state').dataset.state === 'ready'")
    assert await page.evaluate("document.getElementById('model-name').textContent") == "smol"
    light = await page.evaluate(BACKGROUND)

    # A chat, with Enter, and what it took.
    await page.evaluate("document.querySelector('.settings').open = true")
    for field, value in (("temperature", "0"), ("max-tokens", "40"), ("seed", "7")):
        await page.evaluate(f"document.getElementById('{field}').value = '{value}'")
    question = "What is the capital of France?"
    await page.type("#question", question)
    await page.press("Enter", 13)
    await page.until("document.querySelector('.turn.assistant .stats') !== null")
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 40,
        "seed": 7,
    }
    address = f"{server.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(address, json=body) as response:
        expected = await response.json()
    shown = await page.evaluate("document.querySelector('.turn.assistant .text').textContent")
    plain = expected["choices"][0]["message"]["content"]
    assert "".join(shown.split()) == "".join(plain.replace("*", "").split())
    stats = await page.evaluate("document.querySelector('.turn.assistant .stats').textContent")
    assert f"generated {expected['usage']['completion_tokens']}" in stats
    assert f"prompt {expected['usage']['prompt_tokens']}" in stats
    assert "TTFT" in stats

    # What the user writes is text.
    await page.type("#question", "<img src=x onerror=alert(1)> **b**")
    await page.click("#send")
    await page.until("document.querySelectorAll('.turn.assistant .stats').length === 2")
    assert await page.evaluate("document.querySelectorAll('.turn.user')[1].querySelector('img, strong')") is None

    # The engine's side moves under load.
    before = await page.evaluate(PIXELS.format(1))
    load = [asyncio.create_task(stream(server.url)) for _ in range(3)]
    await page.until("document.querySelectorAll('#requests td[data-state=decode]').length === 3")
    first = json.loads(
        await page.evaluate(
            "JSON.stringify([...document.querySelectorAll('#requests tbody tr')].map(row => row.cells[5].textContent))"
        )
    )
    await page.until(f"document.querySelector('#requests tbody tr').cells[5].textContent !== {first[0]!r}")
    await page.until("document.querySelectorAll('#prefixes tbody tr:not(.empty)').length > 0")
    assert await page.evaluate(PIXELS.format(1)) != before
    assert "running 3" in await page.until(
        "(label => label.includes('running 3') && label)(document.querySelectorAll('canvas')[1].ariaLabel)"
    )

    # The other scheme, by the system and by the button.
    await page.set_scheme("dark")
    await page.until(f"{BACKGROUND} !== {light!r}")
    await page.click("#theme")
    await page.until(f"{BACKGROUND} === {light!r}")

    # Stop ends an answer, and an error is shown as its message.
    await page.evaluate("document.getElementById('max-tokens').value = ''")
    await page.type("#question", "Count to one thousand, one number in each line.")
    await page.click("#send")
    await page.until("document.querySelectorAll('.turn.assistant')[2]?.querySelector('.text').textContent")
    await page.click("#stop")
    await page.until("document.querySelectorAll('.turn.assistant .stats')[2]?.textContent.includes('stopped')")
    await page.evaluate("document.getElementById('temperature').value = '9'")
    await page.type("#question", "again")
    await page.click("#send")
    error = await page.until("document.querySelector('.turn.assistant .error')?.textContent")
    assert "temperature" in error

    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    await page.until("document.querySelector('#requests tr.empty') !== null")
    foreign = [address for address in page.requested if not address.startswith(server.url)]
    assert not foreign
    # The browser itself reports the refused request.
    assert [problem for problem in page.problems if "400 (Bad Request)" not in problem] == []


def test_chat_requests_plots_and_both_schemes(model_path: Path, tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        async with browser(tmp_path) as page:
            await look(server, page)

    with Server(model_path, *SMALL) as server:
        asyncio.run(asyncio.wait_for(body(server), 600))
