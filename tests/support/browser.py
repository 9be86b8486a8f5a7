"""A page in headless Chromium, driven over its own pipe (the DevTools protocol). Blocking, one page."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import debian
from tests.support.crashing import eventually


def chromium() -> str:
    """Where Chromium is. Installs it where it is missing, and fails where it cannot."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    try:
        debian.install("chromium")
    except debian.NotInstalled as error:
        pytest.fail(f"Chromium is not here, and could not be installed: {error}")
    found = shutil.which("chromium")
    assert found is not None
    return found


def headless_chromium(folder: Path) -> list[str]:
    """The command that starts Chromium; `folder` is for what it keeps."""
    return [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        f"--user-data-dir={folder}",
    ]


class Page:
    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to = to_browser
        self._from = os.fdopen(from_browser, "rb", buffering=0)
        self._rest = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        #: What the page wrote to its console and what it was refused (a broken policy, an exception).
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._from.read(65536)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(json.dumps(event["params"]["entry"]))

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_for(self, *words: str) -> None:
        """Until the page shows all of these."""
        eventually(lambda: all(word in self.text for word in words) or None)

    def type(self, selector: str, value: str) -> None:
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"{place}.focus(); {place}.value = {json.dumps(value)};"
            f"{place}.dispatchEvent(new Event('input', {{bubbles: true}})); null"
        )

    def until(self, script: str) -> Any:
        """Waits until an expression in the page is true, and returns its value."""
        return eventually(lambda: self.run(script) or None)

    def press(self, key: str) -> None:
        """Presses and releases one key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def use_screen(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def use_theme(self, theme: str) -> None:
        """The theme that the system prefers: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """`folder` is for what the browser keeps."""
    own_read, its_write = os.pipe()
    its_read, own_write = os.pipe()
    program = [
        *headless_chromium(folder),
        "--window-size=1280,900",
        "--remote-debugging-pipe",
    ]
    # It talks on 3 and 4.
    redirected = f'exec "$@" 3</dev/fd/{its_read} 4>/dev/fd/{its_write}'
    process = subprocess.Popen(
        ["sh", "-c", redirected, "-", *program],
        pass_fds=(its_read, its_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(its_read)
    os.close(its_write)
    try:
        found = Page(own_write, own_read)
        found.attach()
        yield found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(own_write)
        os.close(own_read)
