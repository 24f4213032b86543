"""Headless Chromium for tests, driven over its DevTools protocol."""

import asyncio
import base64
import itertools
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_ADDRESS = re.compile(rb"DevTools listening on (ws://\S+)")


class Page:
    """One tab. `problems` collects what a developer would see in red: console errors, exceptions, refused loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requested: list[str] = []  # addresses

    async def read(self) -> None:
        """Take in what the browser says, until it ends."""
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(AssertionError(data["error"]))
                else:
                    answer.set_result(data["result"])
                continue
            match data["method"], data["params"]:
                case "Runtime.exceptionThrown", params:
                    self.problems.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled", params if params["type"] in ("error", "warning", "assert"):
                    self.problems.append(str(params["args"]))
                case "Log.entryAdded", params if params["entry"]["level"] in ("error", "warning"):
                    self.problems.append(str(params["entry"]))
                case "Network.requestWillBeSent", params:
                    self.requested.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        return await asyncio.wait_for(answer, 30)

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.set_scheme(scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def set_scheme(self, scheme: str) -> None:
        """What the system is said to prefer: light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def evaluate(self, script: str) -> Any:
        """Value of an expression on the page, as JSON has it: an element is {}. Promises are awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 120) -> Any:
        """Ask again until the expression is truthy; its value."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.05)
        return value

    async def type(self, selector: str, text: str) -> None:
        await self.evaluate(f"document.querySelector({selector!r}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = {"text": "\r"} if kind == "char" and key == "Enter" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({selector!r}).click()")

    async def screenshot(self) -> bytes:
        """PNG of what is seen."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Page]:
    """A browser with an empty profile in `directory`, and one tab."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={directory}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while (found := _ADDRESS.search(line := await process.stderr.readline())) is None:
                assert line, "the browser did not start"
        drain = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(found[1].decode(), max_msg_size=64 << 20) as socket,
        ):
            page = Page(socket)
            reader = asyncio.create_task(page.read())
            await page.attach()
            yield page
            reader.cancel()
        drain.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
