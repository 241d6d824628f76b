"""A real browser, driven through the two pipes of its DevTools protocol: pages at any width, light or dark."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars")
OF_PAGES = ("Network.requestWillBeSent", "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


@dataclass
class Browser:
    """One tab. Messages are JSON, each ended by a zero byte."""

    commands: Any
    answers: Any
    session: str = ""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    _count: int = 0

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come first are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, page: Path, *, width: int, dark: bool, query: str = "") -> list[Mapping[str, Any]]:
        """Load a page at a width in CSS pixels; return requests, console messages and exceptions until it was there.

        `query` has the words of a page that searches.
        """
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri() + (f"?q={quote(query)}" if query else ""))
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()
        return [event for event in self.events if event["method"] in OF_PAGES]

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        received = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            received += byte
        answer = json.loads(received)
        if "method" in answer:
            self.events.append(answer)
        return answer


@contextmanager
def started() -> Iterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # root may not have its sandbox
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{from_us} 4>&{to_us}',
                "bash",
                str(CHROMIUM),
                f"--user-data-dir={profile}",
                *flags,
            ],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            with os.fdopen(to_browser, "wb") as commands, os.fdopen(from_browser, "rb") as answers:
                browser = Browser(commands, answers)
                tab = browser.ask("Target.createTarget", url="about:blank")["targetId"]
                browser.session = browser.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
                for domain in ("Page", "Network", "Runtime", "Log"):
                    browser.ask(f"{domain}.enable")
                yield browser
                browser.session = ""
                browser.ask("Browser.close")
        finally:
            process.kill()
            process.wait(timeout=30)
