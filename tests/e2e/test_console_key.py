"""The console of a server with API keys, in a real browser."""

import asyncio
from pathlib import Path

import pytest

from config.api_keys import key_line
from tests.e2e.browser import CHROMIUM, Page, browser
from tests.e2e.server import SMALL, Server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]

KEY = "sk-console"
STATE = "document.getElementById('state').dataset.state"
HINT = "document.getElementById('key-hint').textContent"
OPEN = "document.getElementById('key-panel').open"


async def enter(page: Page, key: str) -> None:
    await page.evaluate("document.getElementById('key').value = ''")
    await page.type("#key", key)
    await page.press("Enter", 13)


async def look(server: Server, page: Page) -> None:
    await page.open(server.url)
    await page.until(f"{STATE} === 'locked' && {OPEN}")
    assert "API key is needed" in await page.evaluate(HINT)

    # A chat without a key says so, too.
    await page.type("#question", "Hello?")
    await page.click("#send")
    assert "API key" in await page.until("document.querySelector('.turn.assistant .error')?.textContent")

    # Wrong keys; also one that no header can carry.
    for wrong in ("wrong", "ключ"):
        await enter(page, wrong)
        await page.until(f"{OPEN} && {HINT}.includes('not one of this server')")
        assert await page.evaluate(STATE) == "locked"

    await enter(page, KEY)
    await page.until(f"{STATE} === 'ready' && !{OPEN}")
    await page.until("document.querySelectorAll('canvas')[0].ariaLabel")

    # It stays for this tab, and nowhere else.
    await page.open(server.url)
    await page.until(f"{STATE} === 'ready'")
    assert await page.evaluate("document.getElementById('key').value") == KEY
    assert await page.evaluate("Object.values(localStorage).includes('sk-console') || document.cookie") in (False, "")
    assert not any(KEY in address for address in page.requested)

    await page.evaluate("document.getElementById('max-tokens').value = '30'")
    await page.type("#question", "What is the capital of France?")
    before = await page.evaluate("document.querySelectorAll('canvas')[0].toDataURL()")
    await page.click("#send")
    await page.until("document.querySelector('.turn.assistant .stats') !== null")
    assert await page.evaluate("document.querySelector('.turn.assistant .text').textContent")
    await page.until(f"document.querySelectorAll('canvas')[0].toDataURL() !== {before!r}")


def test_a_key_is_asked_for_kept_and_used(model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line(KEY, "console") + "\n")
    keys.chmod(0o600)

    async def body(server: Server) -> None:
        async with browser(tmp_path / "profile") as page:
            await look(server, page)

    with Server(model_path, *SMALL, "--api-key-file", str(keys)) as server:
        asyncio.run(asyncio.wait_for(body(server), 300))
    assert KEY not in server.stderr
    assert "Traceback" not in server.stderr
