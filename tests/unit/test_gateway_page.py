"""The page at `/`: its headers and files, its token, and the crashes that it lists."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import ConnectionLost
from mlxsup.gateway import limits
from mlxsup.gateway.operator import TOKEN_HEADER
from mlxsup.gateway.page.crashes import MOST_CRASHES, MOST_LINES, Crashes, lines_of
from mlxsup.gateway.page.page import FILES

from support.eventually import TIMEOUT_S
from support.gateway.played_gateway import PlayedDaemon, Response, Site

TEXTS = {path.name: path.read_text() for path in sorted(FILES.iterdir()) if path.is_file()}
OWN = {name: text for name, text in TEXTS.items() if not name.startswith(("lib-", "LICENSES"))}
"""What is written here; the libraries call nothing of what they contain by themselves."""

TOOLS = Path(__file__).parents[2] / "tools" / "page"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NOT_LOADED = {"http://www.w3.org/2000/svg"}


def ask(method: str, path: str, token: str | None = None, **more: Any) -> Response:
    """The response to one request; `own` as the token stands for that of the page."""
    site = Site(PlayedDaemon())
    if token == "own":
        token = token_of(asyncio.run(site.ask("GET", "/", headers=BROWSER)))
    headers = BROWSER if token is None else {TOKEN_HEADER: token}
    return asyncio.run(site.ask(method, path, headers=headers, **more))


def token_of(page: Response) -> str:
    (token,) = re.findall(r'<meta name="mlxsup-token" content="([^"]+)">', page.body.decode())
    return str(token)


def test_page_forbids_frames_scripts_and_caches() -> None:
    page = ask("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(token_of(page)) >= 32
    assert token_of(page) != token_of(ask("GET", "/")), "each gateway has another one"
    assert page.headers["x-frame-options"] == "DENY"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert "set-cookie" not in page.headers


@pytest.mark.parametrize("accept", ["", "*/*", "application/json"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_program_finds_ollama_in_its_place(method: str, accept: str) -> None:
    found = asyncio.run(Site(PlayedDaemon()).ask(method, "/", headers={"accept": accept}))
    assert (found.status, found.body) == (200, b"Ollama is running")


def test_page_loads_from_the_gateway_alone() -> None:
    loaded = re.findall(r'(?:src|href)="(/[^"]*)"', TEXTS["index.html"])
    assert loaded == ["/page/style.css", "/page/chat.css", "/page/main.js"]
    for text in OWN.values():
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= NOT_LOADED
        assert "@import" not in text
    named = r'(?:from |import\()"\./([^"]+)"'
    imported = {name for text in OWN.values() for name in re.findall(named, text)}
    for name in (*(path.removeprefix("/page/") for path in loaded), *imported):
        response = ask("GET", f"/page/{name}")
        assert (response.status, response.body.decode()) == (200, TEXTS[name])
        assert response.headers["content-type"].startswith("text/")
        assert response.headers["x-content-type-options"] == "nosniff"
    for name in ("index.html", "nothing.js", "..", "../page.py"):
        assert ask("GET", f"/page/{name}").status == 404
    assert {*imported, "main.js"} == {name for name in TEXTS if name.endswith(".js")}


def test_libraries_of_the_page_come_with_their_licences() -> None:
    libraries = json.loads((TOOLS / "package-lock.json").read_text())["packages"]
    licences = TEXTS["LICENSES.txt"]
    for name in ("markdown-it", "highlight.js", "lowlight"):
        assert f"\n{name} {libraries[f'node_modules/{name}']['version']}\n" in licences
    assert all("resolved" not in library for library in libraries.values())


def test_page_makes_no_markup_of_texts() -> None:
    """A model's name, its answer and its log are texts of others."""
    for name, text in OWN.items():
        found = re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
        assert found == [], name


@pytest.mark.parametrize("token", [None, "", "wrong", "ünknown"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/page/state"), ("GET", "/page/log"), ("POST", "/models/load"),
     ("POST", "/models/unload"), ("POST", "/models/restart")],
)  # fmt: skip
def test_page_needs_its_token(method: str, path: str, token: str | None) -> None:
    response = ask(method, path, token, body={"model": "m"} if method == "POST" else None)
    assert (response.status, response.error["code"]) == (403, "operator_only")


def test_state_is_shown_to_the_page() -> None:
    response = ask("GET", "/page/state", "own")
    assert (response.status, response.json()["crashes"]) == (200, [])
    assert response.json()["status"]["models"][0]["name"] == "m"


class BusyDaemon(PlayedDaemon):
    """A daemon that does not answer at first.

    Attributes:
        looks: how often its status was asked for.
        is_busy: whether it does not answer.
        crash: the only model, as it is shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.is_busy = True
        self.crash: dict[str, Any] = {}

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        if self.is_busy:
            raise TimeoutError
        status = await super().status()
        return {**status, "models": [status["models"][0] | self.crash]}

    async def looked_at(self, times: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.looks < times:  # noqa: ASYNC110 - nothing else says so
                await asyncio.sleep(0)


def test_crashes_are_noted_again_once_the_daemon_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FOLLOW_AGAIN_S", 0.0)
    daemon = BusyDaemon()
    site = Site(daemon)

    async def run() -> None:
        async with site.life():
            for times in (1, 2):
                await daemon.looked_at(times)
                lost = ConnectionLost("the daemon is silent", "ipc:///x")
                daemon.subscriptions[-1].items.put_nowait(lost)
            await daemon.looked_at(3)

    asyncio.run(run())


def test_busy_daemon_is_asked_again_at_the_next_change() -> None:
    daemon = BusyDaemon()
    site = Site(daemon)

    async def run() -> list[dict[str, Any]]:
        async with site.life():
            await daemon.looked_at(1)
            daemon.is_busy, daemon.crash = False, row(generation=1)
            (told,) = daemon.subscriptions
            told.items.put_nowait({"model": "m", "from": "READY", "to": "BACKOFF", "why": ""})
            await daemon.looked_at(2)
            daemon.crash = row(generation=2, reason="asked")
            token = token_of(await site.ask("GET", "/", headers=BROWSER, has_life=False))
            headers = {TOKEN_HEADER: token}
            response = await site.ask("GET", "/page/state", headers=headers, has_life=False)
            crashes: list[dict[str, Any]] = response.json()["crashes"]
            return crashes

    assert [crash["generation"] for crash in asyncio.run(run())] == [1]


def row(
    name: str = "m", generation: int = 1, state: str = "BACKOFF", **last: Any
) -> dict[str, Any]:
    """A model of a status whose last process has ended so."""
    exit = {"reason": "crash", "signal": "SIGKILL", "code": None, "detail": "", "at": 10.0}
    return {"name": name, "generation": generation, "state": state, "last_exit": {**exit, **last}}


def listed(*statuses: list[dict[str, Any]]) -> list[tuple[str, int]]:
    crashes = Crashes()
    for rows in statuses:
        crashes.observe({"models": rows})
    return [(crash.model, crash.generation) for crash in crashes.latest()]


FIRST, SECOND = row(generation=1, at=10.0), row(generation=2, at=20.0)


@pytest.mark.parametrize(
    ("given", "crashes"),
    [
        ([[FIRST], [FIRST], [SECOND], [SECOND]], [("m", 2), ("m", 1)]),
        ([[row("a", at=20.0), row("b", at=10.0)]], [("a", 1), ("b", 1)]),
        # A crash belongs to the process before the one that is shown.
        (
            [[row(generation=n, state=state)]
             for n, state in ((2, "BACKOFF"), (3, "LOADING"), (3, "READY"))],
            [("m", 2)],
        ),
        ([[row(reason="asked"), {"name": "n", "last_exit": None}]], []),
        (
            [[row(generation=n, at=float(n))] for n in range(1, 101)],
            [("m", n) for n in range(100, 100 - MOST_CRASHES, -1)],
        ),
    ],
    ids=["once", "two models", "the process before", "an asked end", "old ones are dropped"],
)  # fmt: skip
def test_crashes_are_listed_newest_first(
    given: list[list[dict[str, Any]]], crashes: list[tuple[str, int]]
) -> None:
    assert listed(*given) == crashes


RULE = "--- generation {} pid 1 2026-01-01T00:00:00Z"


def test_lines_of_a_process_lie_between_its_rules(tmp_path: Path) -> None:
    many = [f"line {n}" for n in range(100)]
    lines = [RULE.format(1), "one", RULE.format(2), *many, RULE.format(3), "three"]
    (tmp_path / "m.log").write_text("\n".join(lines) + "\n")
    assert lines_of(tmp_path, "m", 1) == ["one"]
    assert lines_of(tmp_path, "m", 2) == many[-MOST_LINES:]
    assert lines_of(tmp_path, "m", 3) == ["three"]
    assert lines_of(tmp_path, "m", 4) == []
    assert lines_of(tmp_path, "other", 1) == []
    lines = [RULE.format(1), "before", RULE.format(1), "after", RULE.format(2)]
    (tmp_path / "m.log").write_text("\n".join(lines) + "\n")
    assert lines_of(tmp_path, "m", 1) == ["after"], "those of the later daemon"
