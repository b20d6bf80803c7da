"""A page in a headless Chromium, used with the clicks and keys of a reader.

Chromium is asked over its own debugging pipe, so that nothing but a system browser is needed. Input is sent as events
of the mouse and the keyboard, and not by calls of functions of the page.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium or google-chrome on the PATH")

LONGEST_WAIT_S = 120
KEYS = {"Enter": (13, "\r"), " ": (32, " "), "Escape": (27, ""), "Tab": (9, "")}
BEFORE = """
window.errors = [];
addEventListener("error", (event) => window.errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => window.errors.push(String(event.reason)));
"""


class Browser:
    """One tab of a Chromium. `browser` starts it."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._buffer = b""
        self._next = 0
        self._tab = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=BEFORE)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._tab:
            message["sessionId"] = self._tab
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], LONGEST_WAIT_S)
            assert ready, "the browser does not answer"
            part = os.read(self._back, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def size(self, width: int, height: int = 900) -> None:
        """Sets the size of the window; one below 600 pixels is a phone."""
        phone = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def media(self, *, print: bool = False) -> None:
        """Sets what the page is shown on."""
        scheme = [{"name": "prefers-color-scheme", "value": "light"}]
        self._call("Emulation.setEmulatedMedia", media="print" if print else "", features=scheme)

    def open(
        self, file: Path, address: str = "", ready: str = 'document.documentElement?.dataset.ready === "yes"'
    ) -> None:
        """Loads a file, at an address such as `#cells`, and waits until the expression `ready` holds."""
        # without a page in between, another address of the same file would not load it again
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=file.as_uri() + address)
        self.wait(ready)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns once an expression holds."""
        end = time.monotonic() + LONGEST_WAIT_S
        while not self.js(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def click(self, selector: str, text: str = "") -> None:
        """Presses the mouse on the first element that the selector finds and whose text begins so."""
        place = self.js(
            f"""(() => {{
              const node = [...document.querySelectorAll({json.dumps(selector)})]
                .find((one) => one.textContent.trim().startsWith({json.dumps(text)}) && one.getClientRects().length);
              if (!node) return null;
              node.scrollIntoView({{ block: "center" }});
              const [box] = node.getClientRects();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        assert place, f"nothing to click on: {selector} {text}"
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def key(self, key: str) -> None:
        """Presses a key where the focus is."""
        code, text = KEYS[key]
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Writes a text into a field."""
        self.click(selector)
        self._call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Chooses a value of a list, which a browser draws outside of the page."""
        self.js(
            f"""(() => {{ const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)};
            node.dispatchEvent(new Event("input", {{ bubbles: true }}));
            node.dispatchEvent(new Event("change", {{ bubbles: true }})); }})()"""
        )

    def back(self) -> None:
        """Goes back by one step."""
        self.js("history.back()")

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Writes what is seen as a PNG; whole: all that can be scrolled to."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A headless Chromium whose profile is in this folder."""
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()

    def pipes() -> None:
        # the browser reads at 3 and writes at 4, whatever numbers the pipes have here
        reading, writing = os.dup(to_read), os.dup(back_write)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"),
    ]
    # pass_fds would close 3 and 4 before `pipes` has made them
    process = subprocess.Popen(
        command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(back_write)
    try:
        yield Browser(process, to_write, back_read)
    finally:
        # asked to end, it has written its profile before the folder is removed
        with contextlib.suppress(OSError):
            os.write(to_write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(back_read)
