"""The chat of the page in a real browser: what it shows, keeps, repeats and survives."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from support.daemon.daemon import fake, row
from support.eventually import eventually
from support.gateway.browser import AXE, CHROMIUM, NO_AXE, NO_CHROMIUM, Browser
from support.gateway.http_daemon import HttpDaemon, gateway_of
from support.gateway.pictures import PNG_BASE64, PNG_URL

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

DESKTOP = (1280, 900)
ZOOMED = (640, 450)
"""What is left of a desktop at 200 %."""

PHONE = (360, 740)
ANSWER = ".turn.assistant:last-child"


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    options = {"step_s": 0.03, "context_length": 100_000}
    models = {
        "m": fake(fake=options, max_concurrency=2),
        "other": fake(preload=False),
        "seeing": fake(preload=False, fake={"takes_pictures": True}),
        "slow": fake(preload=False, fake={**options, "load_s": 4.0, "load_steps": 20}),
    }
    with HttpDaemon(models) as running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.fixture
def browser(daemon: HttpDaemon) -> Iterator[Browser]:
    """A new browser with an empty chat."""
    with Browser() as started:
        started.size(*DESKTOP)
        show(started, daemon)
        yield started


def show(browser: Browser, daemon: HttpDaemon, path: str = "/#chat") -> None:
    browser.open(f"{daemon.url}{path}")
    browser.until("document.querySelector('#model').value")


def say(browser: Browser, text: str) -> None:
    browser.click("#message")
    browser.type(text)
    browser.press("Enter")


def shows(selector: str, text: str) -> str:
    """An expression: an element shows a text."""
    return f"document.querySelector({selector!r})?.innerText.includes({text!r})"


def answered(browser: Browser, say_it: str = "") -> None:
    """Wait for the end of an answer, having asked for it."""
    if say_it:
        number = len(turns(browser)) + 2
        say(browser, f"[[say {say_it}]]")
        browser.until(f"document.querySelectorAll('.turn').length === {number}")
    browser.until("document.querySelector('#doing').textContent === 'Answered'")


def begun(browser: Browser) -> str:
    """Wait for the first words of an answer, and return them."""
    browser.until(f"document.querySelector('{ANSWER} .text')?.textContent.length > 20")
    return text(browser)


def text(browser: Browser) -> str:
    return str(browser.evaluate(f"document.querySelector('{ANSWER} .text').textContent"))


def click(browser: Browser, label: str, within: str = "#chat") -> None:
    """Click the button of this name or text."""
    find = (
        f"[...document.querySelectorAll({within + ' button'!r})].filter((one) =>"
        f" one.checkVisibility() && [one.ariaLabel, one.textContent.trim()].includes({label!r}))"
        ".at(-1)"
    )
    browser.until(find)
    browser.evaluate(f"{find}.click()")


def choose(browser: Browser, model: str) -> None:
    browser.choose("#model", model)


def turns(browser: Browser) -> list[str]:
    return list(
        browser.evaluate(
            "[...document.querySelectorAll('.turn .text')].map((one) => one.innerText)"
        )
    )


# ---------------------------------------------------------------- texts of a model

DRAWN = """(async () => {
    const { Prose } = await import('/page/markdown.js');
    const make = () => document.body.appendChild(document.createElement('div'));
    const given = %s, whole = make(), grown = make();
    new Prose(whole).update(given, true);
    const prose = new Prose(grown);
    const step = Math.max(7, Math.ceil(given.length / 200));
    for (let end = step; end < given.length; end += step) {
        prose.update(given.slice(0, end), false);
        if (given.length < 3000) prose.draw();
    }
    prose.update(given, true);
    const all = [...whole.querySelectorAll('*')];
    const found = {
        tags: [...new Set(all.map((one) => one.localName))].sort(),
        links: all.filter((one) => one.href !== undefined).map((one) => one.href),
        attributes: [...new Set(all.flatMap((one) => one.getAttributeNames()))].sort(),
        text: whole.textContent, count: all.length,
        isSame: whole.innerHTML === grown.innerHTML,
    };
    whole.remove(); grown.remove();
    return found;
})()"""

TAGS = {
    "a", "blockquote", "br", "button", "code", "div", "em", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "path", "pre", "s", "span", "strong", "svg", "table", "tbody", "td", "th", "thead",
    "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {
    "aria-hidden", "aria-label", "class", "d", "href", "rel", "role", "start", "tabindex", "target",
    "title", "type", "viewBox",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a <script>window.pwned=1</script> b", "<script>window.pwned=1</script>"),
        ("<img src=x onerror='window.pwned=1'>", "<img src=x onerror="),
        ("[a](javascript:window.pwned=1) [b](data:text/html,x) [c](vbscript:x)", "a b c"),
        ("![a](https://x.example/t.png) ![](data:image/svg+xml,<svg/onload=x>)", "Picture: a"),
        ("[a](<https://x.example/\" onclick=\"window.pwned=1>)", "a"),
        ("| <svg onload=window.pwned=1> |\n|:-:|\n| `<b>` |", "<svg onload=window.pwned=1>"),
        ("```<img src=x>\n<script>window.pwned=1</script>\n```", "<script>window.pwned=1</script>"),
        ("```js\n\u202e} // \u2066\n```", "[U+202E]} // [U+2066]"),
        ("\x1b[31mred\x1b[0m\x07 \x9b1m", "\u241b[31mred\u241b[0m\u2407 [U+009B]1m"),
        ("> " * 5000 + "deep", "deep"),
        ("".join(" " * n + "- a\n" for n in range(200)), "- a"),
        ("[" * 50_000, "[[["),
        ("*a **a " * 10_000, "*a **a"),
        ("x" * 1_000_000, "x" * 1_000_000),
        ("|a" * 300 + "|\n" + "|-" * 300 + "|\n" + ("|b" * 300 + "|\n") * 150, "|a|a"),
        ("# h\n\n1. a\n2. b\n   - c\n\n> q\n\n| a | b |\n|-|-:|\n| 1 | 2 |\n\n```py\nx = 1\n```\n\n"
         "[l][1] and **b** ~~s~~ https://x.example\n\n[1]: https://y.example\n\n---\nend", "end"),
    ],
    ids=["script", "event", "address", "picture", "attribute", "table", "fence", "direction",
         "control", "quotes", "lists", "brackets", "stars", "one line", "cells", "all kinds"],
)  # fmt: skip
def test_text_of_a_model_becomes_known_elements_only_and_none_of_it_is_lost(
    page: Browser, given: str, shown: str
) -> None:
    found = page.evaluate(DRAWN % json.dumps(given))
    assert shown in found["text"]
    assert set(found["tags"]) <= TAGS
    assert set(found["attributes"]) <= ATTRIBUTES
    assert {link.partition(":")[0] for link in found["links"]} <= {"http", "https", "mailto"}
    assert found["count"] < 25_000
    assert found["isSame"], "a text that has grown looks as if it had come at once"
    assert page.evaluate("typeof window.pwned") == "undefined"
    assert page.problems == []


@pytest.fixture(scope="module")
def page(daemon: HttpDaemon) -> Iterator[Browser]:
    """One browser for all texts."""
    with Browser() as started:
        show(started, daemon)
        yield started


# ---------------------------------------------------------------- what can be done


def test_answer_is_markdown_with_its_thoughts_folded_and_its_figures(browser: Browser) -> None:
    answered(browser, "<think>hm</think>Use `x`:\n\n```python\nx = 1\n```")
    assert browser.text(f"{ANSWER} .code code") == "x = 1"
    browser.until(f"document.querySelector('{ANSWER} .hljs-number')")
    assert not browser.evaluate(f"document.querySelector('{ANSWER} .thoughts').open")
    browser.click(f"{ANSWER} summary")
    browser.until(shows(f"{ANSWER} .thought", "hm"))
    assert "tokens" in browser.text(f"{ANSWER} .figures")
    assert ("log", "Messages") in browser.spoken()
    assert browser.problems == []


def test_message_is_edited_and_answer_repeated_and_the_earlier_ones_are_kept(
    browser: Browser, daemon: HttpDaemon
) -> None:
    answered(browser, "one")
    click(browser, "Edit message")
    browser.evaluate("document.querySelector('.edit textarea').select()")
    browser.type("[[say two]]")
    click(browser, "Send", ".edit")
    browser.until(shows(f"{ANSWER} .text", "two"))
    answered(browser)
    click(browser, "Answer again")
    browser.until(shows(f"{ANSWER} .beside", "2 of 2"))
    answered(browser)
    assert turns(browser) == ["[[say two]]", "two"]
    click(browser, "Show the one before", ".turn.user")
    assert turns(browser) == ["[[say one]]", "one"]
    show(browser, daemon, "/#models")
    browser.evaluate("history.back()")
    browser.until("document.querySelectorAll('.turn').length === 2")
    assert turns(browser) == ["[[say one]]", "one"]
    assert browser.text(".turn.user .beside") == "1 of 2"
    assert browser.problems == []


def test_answer_is_stopped_once_and_continued(browser: Browser, daemon: HttpDaemon) -> None:
    said = recorded(browser)
    say(browser, "without end")
    begun(browser)
    browser.press("Escape")
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    assert browser.evaluate("document.body.innerText.split('Stopped').length") == 2
    before = text(browser)
    with daemon.client() as client:
        eventually(lambda: not row(client, "m")["running"], what="a free row")
    click(browser, "Continue")
    browser.until(
        f"document.querySelector('{ANSWER} .text').textContent.length > {len(before)} + 9"
    )
    assert text(browser).startswith(before)
    browser.type("typed meanwhile")
    click(browser, "Stop")
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    assert browser.evaluate("document.querySelector('#message').value") == "typed meanwhile"
    assert said()[-1] == ""
    assert browser.problems == []


def test_chats_are_kept_found_renamed_saved_deleted_and_brought_back(
    browser: Browser, daemon: HttpDaemon
) -> None:
    titles = "[...document.querySelectorAll('#kept a')].map((one) => one.textContent)"
    answered(browser, "alpha")
    click(browser, "New chat")
    answered(browser, "beta")
    browser.type("a draft")
    browser.ask("Page.reload")
    browser.until("document.querySelectorAll('.turn').length === 2")
    assert turns(browser) == ["[[say beta]]", "beta"]
    assert browser.evaluate("document.querySelector('#message').value") == "a draft"
    assert browser.evaluate(titles) == ["[[say beta]]", "[[say alpha]]"]
    click(browser, "Rename this chat")
    browser.type("Greek")
    browser.press("Enter")
    browser.until(f"{titles}[0] === 'Greek'")
    browser.click("#search")
    browser.type("ALPHA")
    browser.until(f"{titles}.length === 1")
    assert browser.evaluate(titles) == ["[[say alpha]]"]
    browser.click("#kept a")
    browser.until(shows(".turn.user .text", "alpha"))
    click(browser, "Delete this chat")
    browser.until("!document.querySelector('.turn')")
    click(browser, "Undo")
    browser.until(shows(".turn.user .text", "alpha"))
    saved = browser.evaluate(
        "new Promise((found) => { URL.createObjectURL = (file) => (file.text().then(found), '#');"
        " document.querySelector('[aria-label=\"Save this chat as a file\"]').click(); })"
    )
    assert saved == "# [[say alpha]]\n\n## You\n\n[[say alpha]]\n\n## m\n\nalpha\n"
    click(browser, "New chat")
    say(browser, "without end")
    begun(browser)
    click(browser, "Delete this chat")
    with daemon.client() as client:
        eventually(lambda: not row(client, "m")["running"], what="the end of its answer")
    browser.ask("Page.reload")
    browser.until(f"{titles}.length >= 2")
    assert sorted(browser.evaluate(titles)) == ["Greek", "[[say alpha]]"]
    assert browser.problems == []


def test_settings_go_with_the_request_and_stay_with_the_chat(browser: Browser) -> None:
    click(browser, "Chat settings")
    browser.click("#system")
    browser.type("be brief")
    browser.click("#max_tokens")
    browser.type("7")
    sent = (
        "(() => { const real = window.fetch; window.fetch = (path, options) => {"
        " if (path.includes('completions')) window.sent = JSON.parse(options.body);"
        " return real(path, options); }; })()"
    )
    browser.evaluate(sent)
    say(browser, "hello")
    answered(browser)
    body = browser.evaluate("window.sent")
    assert body["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"},
    ]  # fmt: skip
    assert (body["max_tokens"], "temperature" in body) == (7, False)
    assert browser.text(f"{ANSWER} .figures").startswith("7 tokens")
    browser.until(shows(f"{ANSWER} .end", "has reached its length limit"))
    click(browser, "New chat")
    assert browser.evaluate("document.querySelector('#system').value") == "be brief"


def test_model_that_is_not_loaded_answers_after_a_bar(browser: Browser, daemon: HttpDaemon) -> None:
    said = recorded(browser)
    browser.until(shows("#model", "other (not loaded)"))
    choose(browser, "other")
    answered(browser, "hello")
    assert browser.text(f"{ANSWER} .who") == "other"
    assert said()[-1] == "Answered"
    with daemon.client() as client:
        client.unload("other")
    assert browser.problems == []


def test_refused_request_says_why_in_its_place_and_can_be_repeated(browser: Browser) -> None:
    choose(browser, "other")
    say(browser, "[[say it goes on]]" + "word " * 5000)
    browser.until(shows(f"{ANSWER} .end", "context"))
    choose(browser, "m")
    click(browser, "Try again")
    answered(browser)
    assert browser.text(f"{ANSWER} .beside") == "2 of 2"
    assert turns(browser)[-1] == "it goes on"


def test_reader_who_scrolls_up_stays_there_and_only_the_last_message_changes(
    browser: Browser,
) -> None:
    browser.evaluate(MANY % 300)
    browser.open(browser.evaluate("location.origin") + "/?many#chat/many")
    browser.until("document.querySelectorAll('.turn').length === 300")
    at = "document.querySelector('#said').scrollTop"
    assert browser.evaluate(f"{at} > 5000")
    browser.evaluate(
        "window.changed = new Set(); new MutationObserver((all) => all.forEach(({target}) =>"
        " window.changed.add(target.parentElement?.closest('.turn')?.dataset.key))).observe("
        "document.querySelector('.turns'), {subtree: true, childList: true, characterData: true})"
    )
    say(browser, "tell me more")
    begun(browser)
    browser.evaluate("window.changed.clear(); document.querySelector('#said').scrollTop = 300; 0")
    before = len(text(browser))
    browser.until(f"document.querySelector('{ANSWER} .text').textContent.length > {before} + 20")
    assert browser.evaluate(at) == 300
    last = browser.evaluate(f"document.querySelector('{ANSWER}').dataset.key")
    assert browser.evaluate("[...window.changed]") == [last]
    click(browser, "Newest")
    browser.until(f"{at} > 5000")
    browser.press("Escape")


MANY = """new Promise((done) => {
    const asked = indexedDB.open('mlxsup');
    asked.onsuccess = () => {
        const both = asked.result.transaction(['heads', 'messages'], 'readwrite');
        const id = (n) => String(n).padStart(4, '0');
        for (let n = 0; n < %d; n += 1) both.objectStore('messages').put({
            id: id(n), chat: 'many', parent: n ? id(n - 1) : null, at: n, state: 'whole',
            role: n %% 2 ? 'assistant' : 'user', model: 'm', calls: [], thought: '',
            text: 'Some **words** and\\n\\n```\\nx = 1\\n```\\n\\n- a\\n- b\\n'.repeat(4),
        });
        both.objectStore('heads').put({
            id: 'many', title: 'many', at: 1, model: 'm', settings: {}, leaf: id(299) });
        both.oncomplete = () => done(1);
    };
})"""


# ---------------------------------------------------------------- for everybody

MARKDOWN = (
    "<think>hm</think># a\n\n> b\n\n| c | d |\n|-|-|\n| 1 | 2 |\n\n"
    "```py\n# x\ndef f(a): return 'b'\n```"
)


@pytest.mark.skipif(not AXE.is_file(), reason=NO_AXE)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, ZOOMED, DESKTOP], ids=["phone", "zoomed", "desktop"])
def test_chat_has_no_accessibility_problem_and_fits(
    browser: Browser, size: tuple[int, int], scheme: str
) -> None:
    browser.size(*size)
    browser.scheme(scheme)
    browser.check_access()
    answered(browser, MARKDOWN)
    browser.until(f"document.querySelector('{ANSWER} .hljs-keyword')")
    browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    browser.check_access()
    click(browser, "Answer again")
    browser.until(shows(f"{ANSWER} .beside", "2 of 2"))
    click(browser, "Edit message")
    click(browser, "Chat settings")
    browser.check_access()
    if size != DESKTOP:
        browser.click("button[aria-label=Chats]")
    click(browser, "Rename this chat")
    browser.check_access()
    assert browser.problems == []


# ---------------------------------------------------------------- pictures

GIVE = """((how, picture) => {
    const bytes = Uint8Array.from(atob(picture), (one) => one.charCodeAt(0));
    const files = [new File([bytes], 'cat.png', {type: 'image/png'}),
                   new File(['<svg/>'], 'x.svg', {type: 'image/svg+xml'})].slice(0, how.count);
    const data = new DataTransfer();
    for (const file of files) data.items.add(file);
    if (how.by === 'choice') {
        const input = document.querySelector('#ask input[type=file]');
        input.files = data.files;
        input.dispatchEvent(new Event('change'));
        return;
    }
    const name = how.by === 'paste' ? 'clipboardData' : 'dataTransfer';
    const event = new (how.by === 'paste' ? ClipboardEvent : DragEvent)(how.by,
        {[name]: data, bubbles: true, cancelable: true});
    document.querySelector('#message').dispatchEvent(event);
})"""


def give(browser: Browser, by: str, count: int = 1) -> None:
    """Give the page a picture, and with a count of 2 a file that is none it takes."""
    browser.evaluate(f"{GIVE}({{by: {by!r}, count: {count}}}, {PNG_BASE64!r})")


def attached(number: int) -> str:
    return f"document.querySelectorAll('.attached img').length === {number}"


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_pictures_are_attached_sent_kept_and_shown(
    browser: Browser, daemon: HttpDaemon, size: tuple[int, int]
) -> None:
    browser.size(*size)
    choose(browser, "seeing")
    browser.until("!document.querySelector('#attach').hasAttribute('aria-disabled')")
    for number, by in enumerate(("choice", "paste", "drop"), 1):
        give(browser, by, count=2)
        browser.until(attached(number))
        browser.until(shows(".talk", "x.svg must be a picture that"))
    click(browser, "Remove cat.png")
    browser.until(attached(2))
    browser.check_access()
    browser.evaluate(
        "{ const before = window.fetch; window.fetch = (url, how) => {"
        " if (how?.body?.includes('messages')) window.sent = how.body;"
        " return before(url, how); } }"
    )
    browser.click("#message")
    browser.type("what?")
    browser.click("#send")
    browser.until("document.querySelector('#doing').textContent === 'Answered'")
    browser.until(attached(0))
    shown = "document.querySelectorAll('.turn.user img[alt=\\'cat.png\\']').length === 2"
    browser.until(shown)
    [message] = json.loads(browser.evaluate("window.sent"))["messages"]
    picture = {"type": "image_url", "image_url": {"url": PNG_URL}}
    assert message["content"] == [picture, picture, {"type": "text", "text": "what?"}]
    show(browser, daemon, browser.evaluate("location.pathname + location.hash"))
    browser.until(shown)
    browser.check_access()
    assert browser.problems == []


PHOTOGRAPH = """(async () => {
    const canvas = new OffscreenCanvas(4032, 3024), pen = canvas.getContext('2d');
    const noise = pen.createImageData(4032, 3024);
    for (let at = 0; at < noise.data.length; at += 65536)
        crypto.getRandomValues(noise.data.subarray(at, at + 65536));
    for (let at = 3; at < noise.data.length; at += 4) noise.data[at] = 255;
    pen.putImageData(noise, 0, 0);
    const file = new File([await canvas.convertToBlob({type: 'image/jpeg', quality: 1})],
        'sea.jpg', {type: 'image/jpeg'});
    const data = new DataTransfer(), input = document.querySelector('#ask input[type=file]');
    data.items.add(file);
    input.files = data.files;
    input.dispatchEvent(new Event('change'));
    return file.size;
})()"""
"""Gives the page what a telephone makes; its bytes."""

SENT = """(() => {
    const one = document.querySelector('.attached img');
    return [one.naturalWidth, one.naturalHeight, one.src.slice(0, 15), one.src.length];
})()"""


def test_a_photograph_of_a_telephone_is_sent_no_larger_than_models_read(browser: Browser) -> None:
    choose(browser, "seeing")
    browser.until("!document.querySelector('#attach').hasAttribute('aria-disabled')")
    assert browser.evaluate(PHOTOGRAPH) > 12_000_000
    browser.until("document.querySelector('.attached img')?.naturalWidth")
    width, height, kind, length = browser.evaluate(SENT)
    assert (width, height, kind) == (2048, 1536, "data:image/jpeg")
    assert length < 6_000_000
    assert browser.problems == []


def test_a_model_that_takes_text_only_says_so_at_the_button(browser: Browser) -> None:
    browser.until("document.querySelector('#attach').getAttribute('aria-disabled')")
    label = browser.evaluate("document.querySelector('#attach').getAttribute('aria-label')")
    assert label == "Attach pictures: m takes text only, no pictures."
    give(browser, "paste")
    browser.until(shows(".talk", "m takes text only, no pictures."))
    assert browser.evaluate(attached(0))


# ---------------------------------------------------------------- what it survives

CRASHED = "The model crashed. Reloading; your answer will continue."


def recorded(browser: Browser) -> Callable[[], list[str]]:
    """Note each sentence about the answer; the function that is returned gives them in order."""
    browser.evaluate(
        "(() => { const one = document.querySelector('#doing'); window.said = [one.textContent];"
        " new MutationObserver(() => window.said.at(-1) !== one.textContent &&"
        " window.said.push(one.textContent)).observe(one, {childList: true, characterData: true,"
        " subtree: true}); })()"
    )
    return lambda: list(browser.evaluate("window.said"))


def test_answer_outlives_its_worker_says_so_once_and_has_the_same_text(
    browser: Browser, daemon: HttpDaemon
) -> None:
    messages = [{"role": "user", "content": "tell me more"}]
    with daemon.client() as client:
        expected = client.complete("slow", messages=messages, max_tokens=150)
        choose(browser, "slow")
        click(browser, "Chat settings")
        browser.click("#max_tokens")
        browser.type("150")
        said = recorded(browser)
        say(browser, "tell me more")
        begun(browser)
        os.kill(row(client, "slow")["pid"], signal.SIGKILL)
        browser.until("!document.querySelector('.waiting progress').hidden")
        assert browser.text("#doing") == CRASHED
        answered(browser)
    assert text(browser).split() == expected.text.split()
    assert said()[-4:] == ["Answering", CRASHED, "Answering", "Answered"]
    assert said().count(CRASHED) == 1
    assert "continued after a break" in browser.text(f"{ANSWER} .figures")
    assert browser.problems == []


HOLD_STATES = (
    "(() => { const ask = window.fetch;"
    " const held = new Promise((free) => { window.free = free; });"
    " window.fetch = async (url, given) => {"
    " if (String(url).includes('/page/state')) await held; return ask(url, given); }; })()"
)


def test_answer_whose_worker_dies_before_the_page_has_seen_it_ready_says_so(
    browser: Browser, daemon: HttpDaemon
) -> None:
    choose(browser, "slow")
    said = recorded(browser)
    browser.evaluate(HOLD_STATES)
    say(browser, "tell me more")
    begun(browser)
    with daemon.client() as client:
        os.kill(row(client, "slow")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "slow")["state"] == "LOADING")
    browser.evaluate("window.free()")
    browser.until(f"document.querySelector('#doing').textContent === {CRASHED!r}")
    browser.until("document.querySelector('#doing').textContent === 'Answering'")
    browser.press("Escape")
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    assert said().count(CRASHED) == 1
    assert browser.problems == []


def test_answer_that_is_paused_says_so_and_that_it_continues(
    browser: Browser, daemon: HttpDaemon
) -> None:
    said = recorded(browser)
    say(browser, "without end")
    begun(browser)
    with daemon.client() as client:
        (request,) = client.requests()["requests"]
        client.pause(request["id"])
        browser.until(shows("#doing", "Paused. It continues once"))
        client.resume(request["id"])
    browser.until("document.querySelector('#doing').textContent === 'Answering'")
    browser.press("Escape")
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    heard = [text.partition(".")[0] for text in said() if text != "Continuing"]
    assert heard[heard.index("Answering") :][:3] == ["Answering", "Paused", "Answering"]
    assert browser.problems == []


def kill_gateway(daemon: HttpDaemon, browser: Browser) -> None:
    with daemon.client() as client:
        first = gateway_of(client)["pid"]
        os.kill(first, signal.SIGKILL)
        gateway_of(client, after=first)


def restart_daemon(daemon: HttpDaemon, browser: Browser) -> None:
    daemon.listen = f"{daemon.address[0]}:{daemon.address[1]}"
    daemon.kill()
    browser.until(shows("#alert", "mlxsup cannot be reached. Trying again"))
    browser.until(shows("#doing", "The answer broke off. It continues once mlxsup is back."))
    daemon.start()


def reload_page(daemon: HttpDaemon, browser: Browser) -> None:
    browser.ask("Page.reload")
    browser.until(f"document.querySelector('{ANSWER}')")


@pytest.mark.parametrize("strike", [kill_gateway, restart_daemon, reload_page])
def test_answer_continues_by_itself_after(
    strike: Callable[[HttpDaemon, Browser], None], browser: Browser, daemon: HttpDaemon
) -> None:
    say(browser, "without end")
    before = begun(browser)
    strike(daemon, browser)
    longer = f"document.querySelector('{ANSWER} .text')?.textContent.length > {len(before)} + 60"
    browser.until(longer)
    assert text(browser).startswith(before.rstrip())
    assert browser.text("#alert") == ""
    browser.until("document.querySelector('#doing').textContent === 'Answering'")
    browser.press("Escape")
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    assert len(turns(browser)) == 2


def test_two_tabs_show_the_same_chat_and_lose_nothing(browser: Browser, daemon: HttpDaemon) -> None:
    say(browser, "without end")
    begun(browser)
    address = browser.evaluate("location.href").replace("/#", "/?other#")
    first, second = browser.session, browser.other_tab()
    show(browser, daemon, address.removeprefix(daemon.url))
    browser.until(shows(f"{ANSWER} .end", "Being answered in another tab."))
    browser.use(first)
    browser.press("Escape")
    browser.use(second)
    browser.until(shows(f"{ANSWER} .end", "Stopped."))
    answered(browser, "two")
    browser.use(first)
    browser.until(shows(f"{ANSWER} .text", "two"))
    assert len(turns(browser)) == 4
    assert browser.problems == []
