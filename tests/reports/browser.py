"""A page in a headless Chromium, used by a script as a reader would use it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium or google-chrome on the PATH")

ERRORS = "<script>window.errors = []; window.onerror = (message) => { window.errors.push(message); };</script>"


def visited(text: str, folder: Path, reader: str) -> dict[str, Any]:
    """Returns the JSON that the script `reader`, run behind a page, wrote into the element `seen`."""
    file = folder / "page.html"
    file.write_text(text.replace("<head>", f"<head>{ERRORS}", 1).replace("</body>", f"{reader}</body>", 1))
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run"),
        *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    assert found.group(1), "a script of the page failed before the reader began"
    return json.loads(html.unescape(found.group(1)))
