"""The page's models, requests, logs and charts in a real browser, with real daemons behind them."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.protocol.text import size_text
from mlxsup.store.sources import EXAMPLE

from support.daemon.daemon import fake, row, wait_for_state
from support.daemon.downloads import FILES, HELD_AT, WEIGHTS_NAME, hub_environment
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually
from support.gateway.browser import AXE, CHROMIUM, NO_AXE, NO_CHROMIUM, Browser
from support.gateway.http_daemon import HttpDaemon, gateway_of
from support.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

PHONE, DESKTOP = (390, 844), (1280, 900)

FOCUS = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    models = {
        "m": fake(fake={"step_s": 0.03}, max_concurrency=2),
        "other": fake(preload=False, idle_unload_s=600),
    }
    running = HttpDaemon(models)
    accounts = "[clients.alice]\nweight = 2\n[clients.bob]\n"
    running.config.write_text(accounts + running.config.read_text())
    with running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def browser(daemon: HttpDaemon) -> Iterator[Browser]:
    with Browser() as started:
        started.size(*DESKTOP)
        started.open(f"{daemon.url}/#models")
        started.until("document.querySelectorAll('.card .word').length === 2")
        yield started


def view(browser: Browser, name: str) -> None:
    browser.click(f'nav a[href="#{name}"]')
    browser.until(f"!document.getElementById({name!r}).hidden")


def card(model: str, what: str) -> str:
    """Return a selector within a model's card."""
    return f'.card[data-key="{model}"] {what}'


def shows(selector: str, text: str) -> str:
    """Return an expression: an element is seen, and has a text."""
    one = f"document.querySelector({selector!r})"
    return f"({one}?.checkVisibility() && {one}.innerText.includes({text!r}))"


def lines(browser: Browser) -> list[str]:
    """Return the lines of the log that are shown."""
    script = "[...document.querySelectorAll('#log > div')].filter((one) => !one.hidden)"
    found: list[str] = browser.evaluate(f"{script}.map((one) => one.textContent)")
    return found


# ---------------------------------------------------------------- models


def test_a_worker_that_is_killed_is_seen_to_go_and_to_come_back_and_why(
    daemon: HttpDaemon, browser: Browser
) -> None:
    with daemon.client() as client:
        stream = client.generate("m", prompt="a", max_tokens=3000)
        eventually(lambda: row(client, "m")["running"])
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        browser.until(shows(card("m", ".note"), "another program killed its process"))
        browser.until(shows(card("m", ".word"), "ready"))
        browser.until(shows("#crashes li", "m: another program killed its process"))
        browser.until(shows("#crashes li", "1 answer continued in the next process"))
        stream.cancel()
    browser.click("#crashes summary")
    browser.until(shows("#crashes pre", "worker started model=m generation=1"))
    browser.until(shows("#crashes li", "out of memory"))
    assert browser.problems == []


def test_unload_and_restart_ask_first_and_say_what_they_interrupt(
    daemon: HttpDaemon, browser: Browser
) -> None:
    unload, restart = card("other", '[data-action="unload"]'), card("m", '[data-action="restart"]')
    assert not browser.evaluate(f"document.querySelector({unload!r}).checkVisibility()")
    browser.evaluate(f"document.querySelector({card('other', 'button')!r}).focus()")
    browser.press("Enter")
    browser.until(shows(card("other", ".word"), "ready"))
    assert browser.evaluate(FOCUS) == "Unload other", "a button that goes hands the focus on"
    browser.until(shows(card("other", ".note"), "Unloads in 9m"))
    browser.click(card("other", '[data-action="keep"]'))
    browser.until(f"document.querySelector({card('other', '.note')!r}).textContent === ''")
    with daemon.client() as client:
        browser.click(unload)
        assert browser.evaluate(FOCUS) == "Cancel"
        browser.press("Escape")
        browser.until("!document.querySelector('dialog')")
        assert row(client, "other")["state"] == "READY"
        browser.click(unload)
        browser.click('dialog [type="submit"]')
        browser.until(shows(card("other", ".word"), "not loaded"))
        stream = client.generate("m", prompt="a", max_tokens=3000)
        browser.until(shows(card("m", '[data-figure="rows"]'), "1"))
        browser.evaluate(f"document.querySelector({restart!r}).focus()")
        browser.press(" ")
        browser.until(shows("dialog", "1 answer may finish first"))
        browser.press("Tab")
        browser.press("Tab")
        browser.evaluate("document.querySelector('dialog [type=submit]').focus()")
        browser.press("Enter")
        browser.until(shows(card("m", ".word"), "finishing its answers"))
        assert browser.evaluate(FOCUS) == "Restart m", "the focus is back where it was"
        stream.cancel()
        eventually(lambda: row(client, "m")["generation"] == 2)
    browser.until(shows(card("m", ".word"), "ready"))
    assert browser.text(card("m", ".answer")) == ""
    assert browser.problems == []


def test_a_model_that_is_removed_takes_the_focus_from_no_other(
    daemon: HttpDaemon, browser: Browser
) -> None:
    browser.evaluate(f"document.querySelector({card('other', 'button')!r}).focus()")
    daemon.write_config({"other": fake(preload=False)})
    with daemon.client() as client:
        assert client.reload()["removed"] == ["m"]
    browser.until("document.querySelectorAll('.card').length === 1")
    assert browser.evaluate(FOCUS) == "Load other"
    assert browser.problems == []


def test_charts_are_there_at_once_for_a_visitor_who_comes_later(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        stream = client.generate("m", prompt="a", max_tokens=3000)
        eventually(lambda: (row(client, "m")["tokens_per_s"] or 0) > 1)
        with Browser() as browser:
            browser.open(f"{daemon.url}/#chat")  # one who looks at something else
            browser.until("document.querySelector('#model').value")
            stream.cancel()
            browser.other_tab()
            browser.open(f"{daemon.url}/#models")
            browser.until("document.querySelectorAll('#memory .line')[0]?.getAttribute('d')")
            names = [name for role, name in browser.spoken() if role == "image"]
            assert [name.partition(",")[0] for name in names] == [
                "Speed", "Memory used", "Requests",
            ]  # fmt: skip
            assert "m: " in names[1]
            assert browser.problems == []


def test_settings_of_a_model_are_changed_and_a_mistake_is_named_by_its_label(
    daemon: HttpDaemon, browser: Browser
) -> None:
    before = daemon.config.read_text()
    browser.click(card("m", '[data-action="settings"]'))
    browser.until(shows("dialog", "Keep loaded for"))
    enter_setting(browser, "Answers at the same time", "lots")
    enter_setting(browser, "Keep loaded for", "2h")
    browser.click('dialog [type="submit"]')
    browser.until(shows("dialog [role=alert]", "Answers at the same time must be an integer"))
    assert daemon.config.read_text() == before
    enter_setting(browser, "Answers at the same time", "3")
    enter_setting(browser, "Other names", "big, best/one")
    enter_setting(browser, "Temperature", "0.5")
    browser.click('dialog [type="submit"]')
    browser.until(shows(card("m", ".answer"), "Saved in "))
    assert browser.evaluate(FOCUS) == "Settings m", "the focus is back where it was"
    model = tomllib.loads(daemon.config.read_text())["models"]["m"]
    assert (model["max_concurrency"], model["idle_unload_s"]) == (3, "2h")
    assert (model["aliases"], model["sampling"]) == (["big", "best/one"], {"temperature": 0.5})
    browser.until(shows(card("m", ".note"), "Unloads in 1h 59m"))
    browser.click(card("m", '[data-action="settings"]'))
    browser.until(shows("dialog", "Keep loaded for"))
    enter_setting(browser, "Keep loaded for", "")
    browser.click('dialog [type="submit"]')
    browser.until("!document.querySelector('dialog')")
    assert "idle_unload_s" not in tomllib.loads(daemon.config.read_text())["models"]["m"]
    assert [one for one in browser.problems if "/page/models/configure" not in one] == []


def enter_setting(browser: Browser, label: str, text: str) -> None:
    find = (
        f"[...document.querySelectorAll('dialog label')].find((one) => one.innerText === {label!r})"
    )
    browser.evaluate("document.querySelector('dialog details').open = true")
    browser.evaluate(f"{find}.control.select()")
    browser.type(text) if text else browser.evaluate(f"{find}.control.value = ''")


class HubDaemon(HttpDaemon):
    """A daemon without models that uses a hub, with a home of its own."""

    def __init__(self, hub: LocalHub) -> None:
        super().__init__({})
        self._variables = hub_environment(hub, self.folder, HOME=str(self.folder))

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        super().start(environment={**self._variables, **(environment or {})})


def test_an_empty_daemon_says_how_to_begin_and_a_download_is_seen_cancelled_and_removed() -> None:
    with local_hub() as hub, Browser() as browser:
        hub.add(EXAMPLE, FILES)
        hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
        with HubDaemon(hub) as daemon, daemon.client() as client:
            browser.size(*DESKTOP)
            browser.open(f"{daemon.url}/#models")
            browser.until(shows("#empty", "No model yet"))
            browser.until(shows("#add", "There is no other model on this machine."))
            browser.click("#wanted")
            browser.type("zzz")
            browser.press("Enter")
            browser.until(shows("#add", "Hugging Face has no other model for MLX called zzz."))
            browser.evaluate("document.querySelector('#wanted').select()")
            browser.type("smol")
            browser.press("Enter")
            browser.until(shows("#found", f"{EXAMPLE}\n"))
            browser.until(shows("#found", "licence: apache-2.0 · 7 downloads last month"))
            browser.click(f'#found button[aria-label="Add {EXAMPLE}"]')
            browser.until(shows("#add-answer", "Added smollm2-135m."))
            cancel = card("smollm2-135m", '[data-action="unload"]')
            browser.until(shows(card("smollm2-135m", ".note"), "Downloading, "))
            browser.until(shows(cancel, "Cancel download"))
            browser.click(cancel)
            browser.until(shows(card("smollm2-135m", ".word"), "not loaded"))
            browser.click(card("smollm2-135m", '[data-action="remove"]'))
            browser.until(shows("dialog", "Its files stay on this machine"))
            browser.click('dialog [type="submit"]')
            browser.until(shows("#empty", "No model yet"))
            assert client.status()["models"] == []
            hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
            browser.click("#empty button")
            browser.until(shows(card("smollm2-135m", ".note"), "Downloading, "))
            client.remove("smollm2-135m")
            browser.click("#wanted")
            browser.type("/etc")
            browser.until(shows("#add", "No other model on this machine"))
            assert browser.evaluate("document.querySelector('#found button')") is None
            assert browser.problems == []
            assert "SmolLM2" not in daemon.config.read_text()


# ---------------------------------------------------------------- requests


def test_requests_are_paused_resumed_cancelled_and_moved_in_the_line(
    daemon: HttpDaemon, browser: Browser
) -> None:
    view(browser, "requests")
    browser.until(shows("#summary", "No request is open."))
    with daemon.client() as client:
        first = client.generate("m", prompt="a", max_tokens=3000, client="alice")
        second = client.generate("m", prompt="b", max_tokens=3000, client="bob")
        waits = client.generate("m", prompt="c", max_tokens=3000, client="bob")
        browser.until(shows("#summary", "2 running, 1 waiting"))
        browser.until(shows("#accounts", "bob: 1 running, 1 waiting"))

        def line(number: int, what: str) -> str:
            return f'#open li[data-key^="#{number} "] {what}'

        browser.until(shows(line(3, ".what"), "waits, place 1"))
        browser.choose(line(3, "select"), "interactive")
        eventually(lambda: priority_of(client, waits.request_id) == "interactive")
        browser.click(line(1, '[data-action="pause"]'))
        browser.until(shows(line(1, ".what"), "paused until you resume it"))
        browser.until(shows(line(3, ".what"), "answers"))
        browser.click(line(2, '[data-action="cancel"]'))
        browser.until(shows("dialog", "Cancel request #2 to m?"))
        browser.click('dialog [type="submit"]')
        browser.until(shows("#ended", "#2 m Cancelled"))
        for _ in second:
            pass
        assert second.result.finish_reason == "cancelled"
        browser.click(line(1, '[data-action="pause"]'))
        browser.until(shows(line(1, ".what"), "answers"))
        first.cancel()
        waits.cancel()
    browser.until(shows("#summary", "No request is open."))
    assert browser.problems == []


def priority_of(client: Any, request: str) -> str:
    (found,) = [one for one in client.requests()["requests"] if one["id"] == request]
    return str(found["priority"])


# ---------------------------------------------------------------- logs


def test_a_log_is_followed_filtered_and_kept_short(daemon: HttpDaemon, browser: Browser) -> None:
    browser.click(card("m", 'a[href="#logs/m"]'))
    browser.until(shows("#log", "process 1 (pid "))
    with daemon.client() as client:
        client.restart("m")
    browser.until(shows("#log", "process 2 (pid "))
    with (daemon.logs / "m.log").open("a") as log:
        log.write("2026-01-01T00:00:00.000Z WARNING careful\nits second line\n")
        log.write("2026-01-01T00:00:00.000Z INFO <img src=x onerror=window.pwned=1>\n")
    browser.until(shows("#log", "<img src=x"))
    assert browser.evaluate("document.querySelectorAll('#log img').length") == 0
    browser.choose("#log-level", "warning")
    assert lines(browser) == ["2026-01-01T00:00:00.000Z WARNING careful", "its second line"]
    browser.click("#log-text")
    browser.type("SECOND")
    assert lines(browser) == ["its second line"]
    browser.until(shows("#log-note", "1 of "))
    browser.choose("#log-name", "mlxsup")
    browser.until(shows("#log-note", "mlxsup.log"))
    with (daemon.logs / "mlxsup.log").open("a") as log:
        log.write("".join(f"2026-01-01T00:00:00.000Z ERROR second {n}\n" for n in range(5000)))
    browser.until(shows("#log", "second 4999"))
    assert len(lines(browser)) == 2000
    left = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight"
    assert browser.evaluate(f"({left})(document.querySelector('#log'))") < 5, "it is followed"
    assert browser.problems == []


# ---------------------------------------------------------------- what dies meanwhile


def test_a_page_outlives_its_gateway(daemon: HttpDaemon, browser: Browser) -> None:
    with daemon.client() as client:
        first = gateway_of(client)["pid"]
        os.kill(first, signal.SIGKILL)
        gateway_of(client, after=first)
        browser.until(shows("#daemon", "HTTP restarted once"))
        browser.click(card("other", '[data-action="load"]'))
        browser.until(shows(card("other", ".word"), "ready"))
    assert browser.text("#alert") == ""


def test_a_page_without_a_daemon_says_so_and_finds_the_next_one() -> None:
    daemon = HttpDaemon({"m": fake()})
    with daemon, Browser() as browser:
        browser.open(f"{daemon.url}/#models")
        browser.until("document.querySelector('.card')")
        daemon.listen = f"{daemon.address[0]}:{daemon.address[1]}"
        daemon.kill()
        browser.until("document.querySelector('#alert').textContent !== ''")
        daemon.start()
        browser.until("document.querySelector('#alert').textContent === ''")


# ---------------------------------------------------------------- keys


def new_key(daemon: HttpDaemon, *arguments: str) -> str:
    done = daemon.run("key", "new", *arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def enter(browser: Browser, field: str, key: str) -> None:
    browser.until(f"document.querySelector({field!r})?.checkVisibility()")
    browser.click(field)
    browser.type(key)
    browser.press("Enter")


def test_a_guest_sees_the_models_an_operator_all_and_a_revoked_key_nothing_more(
    daemon: HttpDaemon,
) -> None:
    boss, guest = new_key(daemon, "boss", "--operator"), new_key(daemon, "guest")
    with Browser() as browser:
        browser.size(*DESKTOP)
        browser.open(f"{daemon.url}/#models")
        browser.until("document.querySelector('#key').checkVisibility()")
        assert browser.evaluate("document.querySelectorAll('.card').length") == 0
        enter(browser, "#key", "wrong")
        browser.until(
            "/no such key|wrong|revoked/i.test(document.querySelector('#alert').innerText)"
        )
        enter(browser, "#key", guest)
        browser.until(shows(card("m", ".word"), "ready"))
        browser.until(shows("#models .locked", "use the key of an operator"))
        assert browser.evaluate("[...document.querySelectorAll('.card button')]"
                                ".every((one) => !one.checkVisibility())")  # fmt: skip
        assert [name for role, name in browser.spoken() if role == "link"][1:] == ["Chat", "Models"]
        view(browser, "chat")
        browser.click("#message")
        browser.type("[[say hello]]")
        browser.press("Enter")
        browser.until(shows(".turn.assistant .text", "hello"))
        view(browser, "models")
        enter(browser, "#models .locked input", boss)
        browser.until("document.querySelector('nav a[href=\"#logs\"]').checkVisibility()")
        view(browser, "logs")
        browser.until(shows("#log", "listening"))
        view(browser, "models")
        browser.click(card("other", '[data-action="load"]'))
        browser.until(shows(card("other", ".word"), "ready"))
        assert daemon.run("key", "revoke", "boss").returncode == 0
        browser.until("document.querySelector('#key').checkVisibility()")
        assert browser.text("#alert") != ""


# ---------------------------------------------------------------- for everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.skipif(not AXE.is_file(), reason=NO_AXE)
def test_the_house_has_no_accessibility_problem(
    daemon: HttpDaemon, browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    browser.size(*size)
    browser.scheme(scheme)
    with daemon.client() as client:
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        client.complete("m", prompt="a", max_tokens=2)
        stream = client.generate("m", prompt="a", max_tokens=3000)
        browser.until("document.querySelector('#crashes summary')")
        browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        browser.until(shows("#crashes pre", "generation=1"))
        browser.check_access("models")
        browser.click(card("m", '[data-action="unload"]'))
        browser.until(shows("dialog", "Unload m?"))
        browser.check_access("a question")
        browser.press("Escape")
        browser.until("!document.querySelector('dialog')")  # it takes clicks until it is gone
        browser.click(card("m", '[data-action="settings"]'))
        browser.until(shows("dialog", "Keep loaded for"))
        browser.evaluate("document.querySelector('dialog details').open = true")
        browser.check_access("settings")
        browser.click('dialog [type="button"]')
        view(browser, "requests")
        browser.until(shows("#open", "answers"))
        browser.until(shows("#ended", "Complete"))
        browser.check_access("requests")
        view(browser, "logs")
        browser.until(shows("#log", "listening"))
        browser.check_access("logs")
        stream.cancel()
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
        view(browser, "chat")
        browser.click("#message")
        browser.type(f"[[say {MARKUP}]]")
        browser.press("Enter")
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
