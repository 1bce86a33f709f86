"""The page in a real browser, used with a mouse, with keys, and without eyes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.text import size_text

from support.daemon.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.gateway.browser import CHROMIUM, NO_CHROMIUM, Browser
from support.gateway.http_daemon import HttpDaemon
from support.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
NO_AXE = "there is no axe-core: npm install --prefix build/npm axe-core"
PHONE = (360, 740)
DESKTOP = (1280, 900)

BEYOND = """[...document.querySelectorAll('body *')].filter((one) =>
    !one.closest('.scroll, .skip') && one.getBoundingClientRect().right > %d + 1).length"""
"""The number of elements beyond the right edge of a window this wide."""


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    models = {"m": fake(fake={"step_s": 0.03}, max_concurrency=2), "other": fake(preload=False)}
    running = HttpDaemon(models)
    accounts = "[clients.alice]\nweight = 2\n[clients.bob]\n"
    running.config.write_text(accounts + running.config.read_text())
    with running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def browser(daemon: HttpDaemon) -> Iterator[Browser]:
    """A browser with the page, once it shows both models."""
    with Browser() as started:
        started.size(*DESKTOP)
        started.open(f"{daemon.url}/#models")
        started.until("document.querySelectorAll('.card .word').length === 2")
        yield started


def view(browser: Browser, name: str) -> None:
    """Choose a view by its link."""
    browser.click(f'nav a[href="#{name}"]')
    browser.until(f"!document.getElementById({name!r}).hidden")


def card(model: str, what: str) -> str:
    """A selector within a model's card."""
    return f'[data-key="{model}"] {what}'


def shows(selector: str, text: str) -> str:
    """An expression: an element shows a text."""
    return f"document.querySelector({selector!r})?.innerText.includes({text!r})"


def say(browser: Browser, text: str) -> None:
    """Types a message, and sends it."""
    view(browser, "chat")
    browser.click("#message")
    browser.type(text)
    browser.press("Enter")


# ---------------------------------------------------------------- for everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.skipif(not AXE.is_file(), reason=NO_AXE)
def test_the_page_has_no_serious_accessibility_problem(
    daemon: HttpDaemon, browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    browser.size(*size)
    browser.scheme(scheme)
    with daemon.client() as client:
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        stream = client.generate("m", prompt="a", max_tokens=3000)
        say(browser, "[[say <think>hm</think>hello]]")
        browser.until("document.querySelector('#doing').textContent === 'Answered'")
        browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        browser.evaluate(AXE.read_text() + "; 0")
        found = browser.evaluate(
            "axe.run().then(({violations}) => violations.map(({id, impact, nodes}) =>"
            " [id, impact, nodes.map(({html, failureSummary}) => html + failureSummary)]))"
        )
        stream.cancel()
    assert [one for one in found if one[1] in ("serious", "critical")] == []
    assert browser.evaluate(BEYOND % size[0]) == 0, "nothing is beyond the right edge"
    assert browser.problems == []


def test_sizes_are_written_as_by_the_command_line(browser: Browser) -> None:
    counts = [0, 1, 1025, 104858, 2**20 + 1, 631_984_128, 2**30, 2**30 + 1, 3 * 2**40]
    script = f"import('/page/view.js').then(({{size}}) => {counts}.map(size))"
    assert browser.evaluate(script) == [size_text(count) for count in counts]


def test_the_page_has_a_dark_theme(daemon: HttpDaemon, browser: Browser) -> None:
    shade = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
        ".reduce((sum, one) => sum + Number(one), 0)"
    )
    browser.scheme("light")
    assert browser.evaluate(shade) > 600
    browser.scheme("dark")
    assert browser.evaluate(shade) < 150


# ---------------------------------------------------------------- the texts of others


MARKUP = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>\u202e"


def test_texts_of_a_hostile_model_client_and_answer_are_shown_and_run_nothing_P31() -> None:
    models = {"m": fake(), "wrong": {"path": "wrong", "preload": True}}
    daemon = HttpDaemon(models)
    make_tiny_model(daemon.folder / "wrong", config={"model_type": MARKUP})
    with daemon, daemon.client() as client, Browser() as browser:
        wait_for_state(client, "wrong", "FAILED")
        stream = client.generate("m", prompt="[[fault slow=0.05]]", client=MARKUP, max_tokens=3000)
        browser.size(*DESKTOP)
        browser.open(f"{daemon.url}/#models")
        browser.until(shows(card("wrong", ".note"), MARKUP))
        browser.until(shows("#crashes li", MARKUP))
        browser.click("#crashes summary")
        browser.until(shows("#crashes pre", "<script>"))
        view(browser, "requests")
        browser.until("document.querySelector('#open li .about')")
        view(browser, "logs")
        browser.until(shows("#log", "<script>window.pwned=1</script>"))
        say(browser, f"[[say {MARKUP}]]")
        browser.until(shows("#said .turn:last-child .text", MARKUP.replace("\u202e", "[U+202E]")))
        assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert browser.evaluate("typeof window.pwned") == "undefined"
        # Should a text become markup after all, the browser still runs nothing of it.
        browser.evaluate(
            "new Promise((blocked) => { document.addEventListener('securitypolicyviolation',"
            " (one) => one.violatedDirective.startsWith('script-src') && blocked(1));"
            f" document.body.insertAdjacentHTML('beforeend', {json.dumps(MARKUP)}); }})"
        )
        assert browser.evaluate("typeof window.pwned") == "undefined"
        stream.cancel()
