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
from support.gateway.http_daemon import HttpDaemon, gateway_of
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


# ---------------------------------------------------------------- what it shows


def test_a_worker_that_is_killed_is_seen_to_go_and_to_come_back(
    daemon: HttpDaemon, browser: Browser
) -> None:
    assert browser.text(card("m", '[data-figure="generation"]')) == "1"
    with daemon.client() as client:
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
    browser.until(shows(card("m", '[data-figure="generation"]'), "2"))
    browser.until(shows(card("m", ".word"), "READY"))
    assert "last crash: SIGKILL" in browser.text(card("m", ".note"))
    view(browser, "logs")
    assert "m, generation 1: SIGKILL" in browser.text("#crashes li")
    browser.click("#crashes summary")
    browser.until(shows("#crashes pre", "worker started model=m generation=1"))
    assert ("status", "") in browser.spoken()
    browser.until("document.querySelector('#news').textContent === 'm is ready'")
    assert browser.problems == []


def test_streams_that_are_paused_and_resumed_are_listed_by_account(
    daemon: HttpDaemon, browser: Browser
) -> None:
    with daemon.client() as client:
        paused = client.generate("m", prompt="a", max_tokens=3000, client="alice")
        stays = client.generate("m", prompt="b", max_tokens=3000, client="bob")
        waits = client.generate("m", prompt="c", max_tokens=3000, client="bob")
        view(browser, "requests")
        browser.until(shows("#accounts", "alice"))
        browser.until(shows('#accounts [data-key="bob"]', "bob\t1\t1\t1"))
        client.pause(paused.request_id)
        browser.until(shows("#open", "paused, paused by somebody"))
        client.resume(paused.request_id)
        waits.cancel()
        eventually(lambda: len(row(client, "m")["running"]) == 2)
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        browser.until(shows("#open", "resumed once after a crash"))
        paused.cancel()
        stays.cancel()
    assert browser.problems == []


def test_a_figure_and_a_curve_show_how_fast_it_is(daemon: HttpDaemon, browser: Browser) -> None:
    with daemon.client() as client:
        stream = client.generate("m", prompt="a", max_tokens=3000)
        browser.until(f"parseFloat(document.querySelector({card('m', '[data-figure=speed]')!r})"
                      ".innerText) > 1")  # fmt: skip
        browser.until("document.querySelectorAll('#speed .line')[0].getAttribute('d').length > 40")
        stream.cancel()
    names = [name for role, name in browser.spoken() if role == "image"]
    assert [name.partition(",")[0] for name in names] == [
        "Tokens per second", "Memory of each worker",
    ]  # fmt: skip
    assert browser.problems == []


# ---------------------------------------------------------------- the buttons


def test_a_model_is_restarted_by_its_button_with_keys_alone(
    daemon: HttpDaemon, browser: Browser
) -> None:
    name = "document.activeElement.getAttribute('aria-label')"
    for _ in range(20):
        browser.press("Tab")
        if browser.evaluate(name) == "Restart m":
            break
    assert browser.evaluate(name) == "Restart m"
    browser.press(" ")
    browser.until(shows(card("m", ".answer"), "Restart: accepted"))
    browser.until(shows(card("m", '[data-figure="generation"]'), "2"))
    browser.until(shows(card("m", ".word"), "READY"))
    assert browser.evaluate(name) == "Restart m", "what changes around it leaves the focus alone"
    assert browser.problems == []


def test_buttons_load_and_unload_and_those_that_do_not_fit_do_nothing(
    daemon: HttpDaemon, browser: Browser
) -> None:
    unload = card("other", '[data-action="unload"]')
    browser.click(unload)
    assert browser.text(card("other", ".answer")) == ""
    browser.click(card("other", '[data-action="load"]'))
    browser.until(shows(card("other", ".word"), "READY"))
    browser.until(f"!document.querySelector({unload!r}).hasAttribute('aria-disabled')")
    browser.click(unload)
    browser.until(shows(card("other", ".word"), "STOPPED"))
    with daemon.client() as client:
        assert row(client, "other")["generation"] == 1
    assert browser.problems == []


def test_a_model_that_is_removed_takes_the_focus_from_no_other(
    daemon: HttpDaemon, browser: Browser
) -> None:
    browser.evaluate(f"document.querySelector({card('other', 'button')!r}).focus()")
    daemon.write_config({"other": fake(preload=False)})
    with daemon.client() as client:
        assert client.reload()["removed"] == ["m"]
    browser.until("document.querySelectorAll('.card').length === 1")
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Load other"
    assert browser.problems == []


def test_a_page_outlives_its_gateway(daemon: HttpDaemon, browser: Browser) -> None:
    with daemon.client() as client:
        first = gateway_of(client)["pid"]
        os.kill(first, signal.SIGKILL)
        gateway_of(client, after=first)
        browser.until(shows("#daemon", "gateway restarted 1 times"))
        browser.click(card("m", '[data-action="restart"]'))
        browser.until(shows(card("m", '[data-figure="generation"]'), "2"))
    assert browser.text("#alert") == ""


def test_a_page_without_a_daemon_says_so_and_finds_the_next_one() -> None:
    daemon = HttpDaemon({"m": fake()})
    with daemon, Browser() as browser:
        browser.open(f"{daemon.url}/#models")
        browser.until("document.querySelector('.card')")
        daemon.listen = f"{daemon.address[0]}:{daemon.address[1]}"
        daemon.kill()
        browser.until(shows("#alert", "tries again"))
        daemon.start()
        browser.until("document.querySelector('#alert').textContent === ''")


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
        browser.until(shows("#open", "running"))
        browser.until("document.querySelector('#crashes summary')")
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


# ---------------------------------------------------------------- keys


def new_key(daemon: HttpDaemon, *arguments: str) -> str:
    done = daemon.run("key", "new", *arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def enter(browser: Browser, key: str) -> None:
    browser.until("document.activeElement.id === 'key'")
    browser.type(key)
    browser.press("Enter")


def test_the_page_asks_for_the_key_of_an_operator_and_again_once_it_is_revoked(
    daemon: HttpDaemon,
) -> None:
    boss, guest = new_key(daemon, "boss", "--operator"), new_key(daemon, "guest")
    alert = "document.querySelector('#alert').innerText.includes"
    with Browser() as browser:
        browser.open(f"{daemon.url}/#models")
        browser.until(f"{alert}('A key is needed')")
        assert browser.evaluate("document.querySelectorAll('.card').length") == 0
        enter(browser, "wrong")
        browser.until(f"{alert}('This key does not work')")
        enter(browser, guest)
        browser.until(f"{alert}('the key of an operator')")
        enter(browser, boss)
        browser.until("document.querySelector('.card')")
        assert browser.evaluate("document.querySelector('#enter').hidden")
        assert browser.text("#alert") == ""
        browser.click('[data-key="m"] [data-action="restart"]')
        browser.until(shows(card("m", '[data-figure="generation"]'), "2"))
        say(browser, "[[say hello]]")
        browser.until("document.querySelector('#doing').textContent === 'Answered'")
        browser.open(f"{daemon.url}/?again#models")
        browser.until("document.querySelector('.card')")
        assert daemon.run("key", "revoke", "boss").returncode == 0
        browser.until("!document.querySelector('#enter').hidden")


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
        view(browser, "logs")
        browser.until(shows("#crashes li", MARKUP))
        browser.click("#crashes summary")
        browser.until(shows("#crashes pre", "<script>"))
        browser.until("document.querySelector('#open tr')")
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
