"""The page of a gateway that needs keys: it asks for that of an operator, and sends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.daemon.daemon import Daemon, fake
from support.gateway.browser import CHROMIUM, NO_CHROMIUM, Browser
from support.gateway.http_daemon import HttpDaemon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM),
]


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    with HttpDaemon({"m": fake()}) as running:
        yield running


def new_key(daemon: Daemon, *arguments: str) -> str:
    """A key that the command line has made."""
    done = daemon.run("key", "new", *arguments)
    assert done.returncode == 0, done.stderr
    key: str = done.stdout.strip()
    return key


def enter(browser: Browser, key: str) -> None:
    """Types a key, and sends the form."""
    browser.until("document.activeElement.id === 'key'")
    browser.type(key)
    browser.press("Enter")


def test_it_asks_for_a_key_and_takes_only_that_of_an_operator(daemon: HttpDaemon) -> None:
    boss, guest = new_key(daemon, "boss", "--operator"), new_key(daemon, "guest")
    alert = "document.querySelector('#alert').innerText.includes"
    with Browser() as browser:
        browser.open(f"{daemon.url}/")
        browser.until(f"{alert}('a key is needed')")
        assert browser.evaluate("document.querySelectorAll('.card').length") == 0
        enter(browser, "wrong")
        browser.until(f"{alert}('no such key')")
        enter(browser, guest)
        browser.until(f"{alert}('the key of an operator')")
        enter(browser, boss)
        browser.until("document.querySelector('.card')")
        assert browser.evaluate("document.querySelector('#enter').hidden")
        assert browser.evaluate("document.querySelector('#alert').hidden")
        browser.click('[data-key="m"] [data-action="restart"]')
        generation = "document.querySelector('[data-figure=generation]').innerText"
        browser.until(f"{generation} === '2'")
        browser.click("#message")
        browser.type("[[say hello]]")
        browser.press("Enter")
        browser.until("document.querySelector('#doing').innerText.startsWith('Complete')")


def test_a_page_whose_key_is_revoked_asks_again(daemon: HttpDaemon) -> None:
    key = new_key(daemon, "boss", "--operator")
    with Browser() as browser:
        browser.open(f"{daemon.url}/")
        enter(browser, key)
        browser.until("document.querySelector('.card')")
        browser.open(f"{daemon.url}/?again")
        browser.until("document.querySelector('.card')")
        assert daemon.run("key", "revoke", "boss").returncode == 0
        browser.until("!document.querySelector('#enter').hidden")
