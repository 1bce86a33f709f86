"""Pictures of the gateway's page for the documents: `make captures`.

Runs a daemon with the demo model under two names and shows its page to Chromium: a chat whose
worker is killed while it answers, on a wide window and in the dark on a phone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from support.browser import CHROMIUM, NO_CHROMIUM, Browser
from support.daemon import row
from support.http_daemon import HttpDaemon

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MODEL = {"path": str(ROOT / "models" / "smollm2"), "preload": True}
QUESTION = "Tell me a short story about a lighthouse keeper and a storm."
OTHER_QUESTION = "Explain in detail how a lighthouse works."
SEEN_S = 40.0
"""For how long it is watched, so that the curves are more than a dot."""


def ask(browser: Browser, text: str, *, tokens: int) -> None:
    """Types a question, and waits for the beginning of the answer."""
    browser.evaluate(f"document.querySelector('#most').value = {tokens}")
    browser.click("#message")
    browser.type(text)
    browser.press("Enter")
    browser.until("[...document.querySelectorAll('.turn .text')].pop().innerText.length > 80")


def main() -> None:
    """Writes both pictures."""
    if CHROMIUM is None:
        sys.exit(NO_CHROMIUM)
    models = {"smollm2": MODEL, "smollm2-copy": MODEL}
    with HttpDaemon(models) as daemon, Browser() as browser, daemon.client() as client:
        for name in models:
            client.load(name)
        browser.size(1180, 900)
        browser.scheme("light")
        browser.open(f"{daemon.url}/")
        until = time.monotonic() + SEEN_S
        others = [
            client.generate(
                "smollm2-copy", messages=[{"role": "user", "content": text}], max_tokens=600
            )
            for text in (QUESTION, OTHER_QUESTION)
        ]
        ask(browser, QUESTION, tokens=120)
        os.kill(row(client, "smollm2")["pid"], signal.SIGKILL)
        browser.until("document.querySelector('#doing').innerText.startsWith('Complete')")
        while time.monotonic() < until:
            time.sleep(0.5)
        browser.picture(IMAGES / "page.png")
        browser.size(390, 844)
        browser.scheme("dark")
        browser.evaluate("scrollTo(0, 0)")
        browser.picture(IMAGES / "page-phone.png", is_whole=False)
        for stream in others:
            stream.cancel()


if __name__ == "__main__":
    main()
