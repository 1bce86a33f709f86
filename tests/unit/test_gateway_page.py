"""The page at `/`: its headers and files, its token, and what it asks the gateway for."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from mlxsup.gateway import limits
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.operator import TOKEN_HEADER
from mlxsup.gateway.page import logs, page
from mlxsup.gateway.page.history import INTERVAL_S, SPAN_S, History
from mlxsup.gateway.page.logs import MOST_LINES, MOST_PART_BYTES, end_of, lines_of, read_part
from mlxsup.gateway.page.page import FILES
from mlxsup.gateway.page.recorded import MOST_CRASHES, MOST_ENDED, Recorder
from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.download import (
    DownloadFailed,
    DownloadProblem,
    FoundRepository,
    RepositoriesFound,
    report_line,
)
from mlxsup.protocol.flight import (
    MODELS_FILE_NAME,
    PAUSED,
    REQUESTS_FILE_NAME,
    Entry,
    LostRow,
    ModelChanged,
    Recorded,
    RequestEnded,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.states import State
from mlxsup.store import hub_search

from support.daemon.hub_caches import write_repository
from support.eventually import TIMEOUT_S
from support.gateway.key_place import new_key, place_in
from support.gateway.played_gateway import PlayedDaemon, Response, Site, refused
from support.models.tiny_model import make_tiny_model

TEXTS = {path.name: path.read_text() for path in sorted(FILES.iterdir()) if path.is_file()}
OWN = {name: text for name, text in TEXTS.items() if not name.startswith(("lib-", "LICENSES"))}
"""What is written here; the libraries call nothing of what they contain by themselves."""

TOOLS = Path(__file__).parents[2] / "tools" / "page"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NOT_LOADED = {"http://www.w3.org/2000/svg"}


def ask(path: str) -> Response:
    """Return what a browser gets."""
    return asyncio.run(Site(PlayedDaemon()).ask("GET", path, headers=BROWSER))


def token_of(answer: Response) -> str:
    (token,) = re.findall(r'<meta name="mlxsup-token" content="([^"]+)">', answer.body.decode())
    return str(token)


def test_the_page_has_words_for_every_state_of_a_model() -> None:
    for name, besides, unnamed in (
        ("models.js", {"AGAIN"}, set[str]()),
        ("chat.js", set[str](), {State.READY}),  # the chat says nothing of a model that serves
    ):
        found = re.search(r"^const STATES = {(.*?)^};", OWN[name], re.MULTILINE | re.DOTALL)
        assert found is not None, name
        named = set(re.findall(r"\b([A-Z]+):", found[1]))
        assert named == {*State, *besides} - unnamed, name


def test_page_forbids_frames_scripts_and_caches() -> None:
    whole = ask("/")
    assert (whole.status, whole.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(token_of(whole)) >= 32
    assert token_of(whole) != token_of(ask("/")), "each gateway has another one"
    assert whole.headers["x-frame-options"] == "DENY"
    policy = whole.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert whole.headers["cache-control"] == "no-store"
    assert "set-cookie" not in whole.headers


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
        response = ask(f"/page/{name}")
        assert (response.status, response.body.decode()) == (200, TEXTS[name])
        assert response.headers["content-type"].startswith("text/")
        assert response.headers["x-content-type-options"] == "nosniff"
    for name in ("index.html", "nothing.js", "..", "../page.py"):
        assert ask(f"/page/{name}").status == 404
    assert {*imported, "main.js"} == {name for name in TEXTS if name.endswith(".js")}


def test_libraries_of_the_page_come_with_their_licences() -> None:
    libraries = json.loads((TOOLS / "package.json").read_text())["devDependencies"]
    del libraries["esbuild"]
    bundled = re.findall(r"^-{72}\n\n(\S+) (\S+)\n", TEXTS["LICENSES.txt"], re.MULTILINE)
    assert dict(bundled) == libraries, "each of them is pinned, so that it is built the same again"


def test_page_makes_no_markup_of_texts() -> None:
    """A model's name, its answer and its log are texts of others."""
    for name, text in OWN.items():
        found = re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
        assert found == [], name


GETS = (
    "/page/state", "/page/requests", "/page/crashes", "/page/history", "/page/log",
    "/page/log/file", "/page/log/process", "/page/found", "/page/search", "/page/settings",
)  # fmt: skip
POSTS = (
    "/models/load", "/models/unload", "/models/restart", "/page/requests/cancel",
    "/page/requests/pause", "/page/requests/resume", "/page/requests/prioritize",
    "/page/models/add", "/page/models/remove", "/page/models/keep", "/page/models/configure",
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path"), [*(("GET", one) for one in GETS), *(("POST", one) for one in POSTS)]
)
def test_page_needs_its_token(method: str, path: str) -> None:
    site = Site(PlayedDaemon())
    body = {"model": "m"} if method == "POST" else None
    for token in (None, "", "wrong", "ünknown"):
        headers: dict[str, str] = BROWSER if token is None else {TOKEN_HEADER: token}
        response = asyncio.run(site.ask(method, path, body, headers=headers))
        assert (response.status, response.error["code"]) == (403, "operator_only"), token


class HouseDaemon(PlayedDaemon):
    """A daemon with an open request, which refuses commands about what is `gone`."""

    async def requests(self) -> dict[str, Any]:
        return {"requests": [{"id": "r1", "number": "#1"}], "more": 0}

    async def command(self, *words: Any) -> dict[str, Any]:
        if words[1] == "gone":
            raise refused("invalid_request", parameter="request", hint="look again")
        await super().command(*words)
        return {"settings": [{"key": f"models.{words[1]}.preload"}]}


class House:
    """A gateway whose page asks with its token.

    Args:
        daemon: behind it.
        keys: that it takes.
    """

    def __init__(self, daemon: HouseDaemon, keys: Keys | None = None) -> None:
        self.site = Site(daemon, keys=keys)
        self.token = self.site.gateway.operator.token

    def get(self, path: str, *, key: str = "") -> Response:
        path, _, query = path.partition("?")
        return asyncio.run(self.site.ask("GET", path, query=query, headers=self._headers(key)))

    def post(self, path: str, body: Any) -> Response:
        return asyncio.run(self.site.ask("POST", path, body, headers=self._headers("")))

    def _headers(self, key: str) -> dict[str, str]:
        return {TOKEN_HEADER: self.token, "x-api-key": key}


# ---------------------------------------------------------------- who may see what


def test_a_guest_sees_the_models_and_why_the_rest_is_missing(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    daemon = HouseDaemon()
    daemon.row = {"folder": "/secret", "repo": "a/b", "rows": [{"client": "boss"}]}
    keys = {name: new_key(place, name, is_operator=name == "boss") for name in ("guest", "boss")}
    house = House(daemon, Keys(place))
    guest = house.get("/page/state", key=keys["guest"])
    assert guest.status == 200
    assert "requires an operator key" in guest.json()["missing"]
    (model,) = guest.json()["status"]["models"]
    assert (model["name"], model["state"]) == ("m", "READY")
    for secret in (b"secret", b"a/b", b"boss", b"log_dir", b"client"):
        assert secret not in guest.body
    assert {house.get(path, key=keys["guest"]).status for path in GETS[1:]} == {403}
    boss = house.get("/page/state", key=keys["boss"]).json()
    assert (boss["missing"], boss["status"]["log_dir"]) == ("", "/nowhere")


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("action", "body", "command"),
    [
        ("cancel", {"request": "r1"}, ("cancel", "r1")),
        ("pause", {"request": "#12"}, ("pause", "#12")),
        ("resume", {"request": "r1"}, ("resume", "r1")),
        ("prioritize", {"request": "r1", "priority": "batch"}, ("prioritize", "r1", "batch")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_buttons_of_a_request_ask_the_daemon(
    action: str, body: dict[str, Any], command: tuple[str, ...]
) -> None:
    daemon = HouseDaemon()
    assert House(daemon).post(f"/page/requests/{action}", body).status == 200
    assert daemon.commands == [command]


@pytest.mark.parametrize(
    ("action", "body", "field"),
    [
        ("cancel", {}, "request"),
        ("cancel", {"request": ""}, "request"),
        ("cancel", {"request": 1}, "request"),
        ("cancel", {"request": "gone"}, "request"),
        ("cancel", {"request": "r1", "now": True}, "now"),
        ("pause", {"request": "r1", "priority": "batch"}, "priority"),
        ("prioritize", {"request": "r1"}, "priority"),
        ("prioritize", {"request": "r1", "priority": "highest"}, "priority"),
        ("prioritize", {"request": "r1", "priority": ["batch"]}, "priority"),
    ],
)
def test_button_with_a_wrong_field_changes_nothing(
    action: str, body: dict[str, Any], field: str
) -> None:
    daemon = HouseDaemon()
    response = House(daemon).post(f"/page/requests/{action}", body)
    assert (response.status, response.error["param"], daemon.commands) == (400, field, [])


# ---------------------------------------------------------------- models that come and go


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two models."""
    home = tmp_path_factory.mktemp("home")
    for name in ("m", "new"):
        make_tiny_model(home / ".mlxsup" / "models" / name)
    return home


@pytest.fixture
def found(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The folders of the models, of which the daemon serves `m` already."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    return {name: home / ".mlxsup" / "models" / name for name in ("m", "new")}


def served(folder: Path) -> HouseDaemon:
    daemon = HouseDaemon()
    daemon.row = {**daemon.row, "folder": str(folder)}
    return daemon


def test_models_on_this_machine_are_added_by_a_key_that_is_no_path(found: dict[str, Path]) -> None:
    daemon = served(found["m"])
    house = House(daemon)
    listed = house.get("/page/found")
    (model,) = listed.json()["models"]
    assert (model["title"], model["problem"]) == ("new", "")
    assert model["size_bytes"] > 0
    assert str(found["new"]).encode() not in listed.body
    assert house.post("/page/models/add", {"found": model["key"]}).status == 200
    assert daemon.commands == [("add", str(found["new"]))]


@pytest.mark.usefixtures("found")
def test_model_of_the_hub_is_added_by_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    write_repository(tmp_path / "hub", "o/m")
    daemon = HouseDaemon()
    house = House(daemon)
    keys = {one["title"]: one["key"] for one in house.get("/page/found").json()["models"]}
    house.post("/page/models/add", {"found": keys["o/m"]})
    assert daemon.commands == [("add", "o/m")], "and not by a folder, which has no revision"


@pytest.mark.parametrize(
    "named", ["org/model", "https://huggingface.co/org/model/tree/main", "qwen3:4b", " org/model "]
)
def test_model_of_the_hub_is_added_by_what_names_it(named: str) -> None:
    daemon = HouseDaemon()
    assert House(daemon).post("/page/models/add", {"model": named}).status == 200
    assert daemon.commands == [("add", named.strip())]


@pytest.mark.parametrize(
    ("action", "body", "field"),
    [
        ("add", {}, "model"),
        ("add", {"model": ""}, "model"),
        ("add", {"model": "   "}, "model"),
        ("add", {"model": 1}, "model"),
        ("add", {"model": "x" * 513}, "model"),
        ("add", {"model": "/etc"}, "model"),
        ("add", {"model": " /etc"}, "model"),
        ("add", {"model": "~/models/m"}, "model"),
        ("add", {"model": "../m"}, "model"),
        ("add", {"model": "a\u0000b"}, "model"),
        ("add", {"model": "a\nb"}, "model"),
        ("add", {"model": "m", "found": "m"}, "model"),
        ("add", {"model": "m", "name": "n"}, "name"),
        ("add", {"found": "0" * 32}, "found"),
        ("add", {"found": "/etc"}, "found"),
        ("remove", {}, "model"),
        ("remove", {"model": ["m"]}, "model"),
        ("remove", {"model": "m", "files": "yes"}, "files"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_model_that_is_named_wrongly_changes_nothing(
    action: str, body: dict[str, Any], field: str, found: dict[str, Path]
) -> None:
    daemon = served(found["m"])
    response = House(daemon).post(f"/page/models/{action}", body)
    assert (response.status, response.error["param"], daemon.commands) == (400, field, [])


def test_model_is_kept_and_removed() -> None:
    daemon = HouseDaemon()
    house = House(daemon)
    assert house.post("/page/models/keep", {"model": "m"}).status == 200
    assert house.post("/page/models/remove", {"model": "m"}).status == 200
    assert daemon.commands == [("load", "m", -1.0), ("remove", "m")]


def test_refusal_of_the_daemon_is_told_with_its_hint() -> None:
    response = House(HouseDaemon()).post("/page/models/remove", {"model": "gone"})
    assert (response.status, response.error["message"]) == (
        400,
        "it is invalid_request; look again",
    )


PRELOAD = "models.m.preload"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "m", "changes": {PRELOAD: "true"}}, ""),
        ({"model": "m", "changes": {PRELOAD: None}}, ""),
        ({"model": "m", "changes": {PRELOAD: True}}, "changes"),
        ({"model": "m", "changes": {PRELOAD: "x" * 513}}, "changes"),
        ({"model": "m", "changes": {PRELOAD: "true", "models.m.path": "/etc"}}, "changes"),
        ({"model": "m", "changes": {"models.n.preload": "true"}}, "changes"),
        ({"model": "m", "changes": {}}, "changes"),
        ({"model": "m", "changes": [PRELOAD]}, "changes"),
        ({"model": "m"}, "changes"),
        ({"changes": {PRELOAD: "true"}}, "model"),
        ({"model": "", "changes": {PRELOAD: "true"}}, "model"),
        ({"model": "m", "changes": {PRELOAD: "true"}, "all": True}, "all"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_settings_that_the_page_lists_are_changed_and_no_others(
    body: dict[str, Any], field: str
) -> None:
    daemon = HouseDaemon()
    response = House(daemon).post("/page/models/configure", body)
    if field:
        assert (response.status, response.error["param"]) == (400, field)
    made = [words for words in daemon.commands if words[0] == "configure"]
    assert made == ([] if field else [("configure", body["changes"])])
    assert (response.status == 200) == (not field)


@pytest.mark.parametrize("words", ["", "%20", "a%00b", "x" * 513])
def test_search_needs_words(words: str) -> None:
    response = House(HouseDaemon()).get(f"/page/search?words={words}")
    assert (response.status, response.error["param"]) == (400, "words")


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("print(report)", 200, '"licence":"mit"'),
        ("print('noise'); print(report)", 200, '"licence":"mit"'),
        ("print(failure)", 503, "no hub; look"),
        ("print('x' * 2_000_000)", 503, "the search has failed"),
        ("raise SystemExit(1)", 503, "the search has failed"),
        ("import time; time.sleep(600)", 503, "does not answer"),
    ],
    ids=["found", "noise before", "a failure", "too much", "nothing", "silence"],
)
def test_search_says_what_a_process_of_its_own_has_found(
    script: str, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FoundRepository(repo="o/m", downloads=1, size_bytes=2, is_gated=False, licence="mit")
    failed = DownloadFailed(problem=DownloadProblem.NETWORK, message="no hub", hint="look")
    given = (
        f"report, failure = {report_line(RepositoriesFound(found=[found]))!r},"
        f" {report_line(failed)!r}; "
    )
    monkeypatch.setattr(hub_search, "download_argv", lambda: [sys.executable, "-c", given + script])
    monkeypatch.setattr(hub_search, "LIMIT_S", 2.0 if "sleep" in script else TIMEOUT_S)
    response = House(HouseDaemon()).get("/page/search?words=m")
    assert (response.status, says in response.body.decode()) == (status, True), response.body


def write_entries(path: Path, *entries: Entry) -> None:
    """Add entries to a file of the flight recorder."""
    with path.open("ab") as file:
        for number, entry in enumerate(entries):
            file.write(Recorded(number=number, at=100.0 + number, entry=entry).to_line())


def ended(number: int, **more: Any) -> RequestEnded:
    return RequestEnded(id=f"r{number}", number=number, model="m", outcome="stop", **more)


def test_requests_are_those_that_are_open_and_the_last_that_have_ended(tmp_path: Path) -> None:
    daemon = HouseDaemon()
    daemon.log_dir = str(tmp_path)
    house = House(daemon)
    assert house.get("/page/requests").json()["ended"] == []
    file = tmp_path / REQUESTS_FILE_NAME
    usage, timings = Usage(completion_tokens=11), Timings(first_token_s=1.0, total_s=3.0)
    write_entries(
        file,
        RequestStarted(id="r1", number=1, model="m"),
        ended(1, usage=usage, timings=timings, client="alice"),
    )
    seen = house.get("/page/requests").json()
    assert [one["number"] for one in seen["requests"]] == ["#1"]
    assert seen["ended"] == [
        {"number": "#1", "model": "m", "client": "alice", "at": 101.0, "outcome": "stop",
         "tokens": 11, "total_s": 3.0, "tokens_per_s": 5.0, "resumed": 0}
    ]  # fmt: skip
    file.write_bytes(file.read_bytes() + b'damaged "request_ended"\n')
    write_entries(file, *(ended(number) for number in range(2, 100)))
    numbers = [one["number"] for one in house.get("/page/requests").json()["ended"]]
    assert numbers == [f"#{number}" for number in range(99, 99 - MOST_ENDED, -1)]


# ---------------------------------------------------------------- crashes


def died(generation: int = 1, **more: Any) -> WorkerDied:
    given = {"reason": "crash", "signal": "SIGKILL", "after": "BACKOFF", **more}
    return WorkerDied(model="m", generation=generation, **given)


def crashes_in(folder: Path, *entries: Entry) -> list[dict[str, Any]]:
    write_entries(folder / MODELS_FILE_NAME, *entries)
    return Recorder(folder).crashes()


def test_crash_is_told_in_the_words_of_why(tmp_path: Path) -> None:
    rows = [LostRow(id="a", number=1), LostRow(id="b", number=2, fate=PAUSED)]
    (crash,) = crashes_in(tmp_path, died(3, rows=rows, more_rows=4))
    assert (crash["model"], crash["generation"], crash["at"]) == ("m", 3, 100.0)
    assert crash["what"] == "another program killed its process (SIGKILL)"
    assert any("out of memory" in one for one in crash["advice"])
    assert (crash["continue"], crash["lost"]) == (1, 5)


@pytest.mark.parametrize(
    ("entries", "generations"),
    [
        ([], []),
        ([died(1), died(2)], [2, 1]),
        ([died(1, reason="asked")], []),
        ([ModelChanged(model="worker_died", generation=1, before="READY", after="x")], []),
        ([died(n) for n in range(1, 101)], list(range(100, 100 - MOST_CRASHES, -1))),
    ],
    ids=["none", "newest first", "an asked end", "another entry", "old ones are left out"],
)
def test_crashes_are_those_of_the_recorder(
    tmp_path: Path, entries: list[Entry], generations: list[int]
) -> None:
    assert [one["generation"] for one in crashes_in(tmp_path, *entries)] == generations


def test_crashes_are_read_again_from_a_new_file_of_the_same_length(tmp_path: Path) -> None:
    file, recorder = tmp_path / MODELS_FILE_NAME, Recorder(tmp_path)
    for generation in (1, 2):
        write_entries(tmp_path / "new", died(generation))
        (tmp_path / "new").replace(file)
        assert [one["generation"] for one in recorder.crashes()] == [generation]


# ---------------------------------------------------------------- history


def status_with(**speeds: float) -> dict[str, Any]:
    rows = [
        {"name": name, "footprint_bytes": 100 * bool(speed), "tokens_per_s": speed,
         "running": ["r"], "queued": 2}
        for name, speed in speeds.items()
    ]  # fmt: skip
    return {"models": rows, "memory": {"budget_bytes": 1000}}


def test_history_has_an_hour_of_samples_and_gives_those_that_are_new() -> None:
    times = iter(range(10_000))
    history = History(wall=lambda: INTERVAL_S * next(times))
    history.take(status_with(m=1.25, stopped=0.0))
    (sample,) = json.loads(history.after(-1.0))["samples"]
    assert sample == {
        "at": 0,
        "budget": 1000,
        "running": 2,
        "waiting": 4,
        "models": {"m": [1.2, 100]},
    }
    for _ in range(2000):
        history.take(status_with())
    told = json.loads(history.after(-1.0))
    assert len(told["samples"]) == SPAN_S / told["interval_s"]
    newest = told["samples"][-1]["at"]
    later = json.loads(history.after(newest - 2 * INTERVAL_S))["samples"]
    assert [one["at"] for one in later] == [newest - INTERVAL_S, newest]


def test_clock_that_is_set_back_stops_no_samples() -> None:
    times = iter([1000.0, 1000.0 + INTERVAL_S / 2, 400.0, 400.0])
    history = History(wall=lambda: next(times))
    for _ in range(3):
        history.take(status_with(m=1.0))
    assert [one["at"] for one in json.loads(history.after(-1.0))["samples"]] == [1000, 400]


def test_samples_are_of_what_pages_ask_for_and_seconds_apart() -> None:
    daemon = HouseDaemon()
    daemon.row = {**daemon.row, **status_with(m=1.0)["models"][0]}
    house = House(daemon)
    for _ in range(3):
        assert house.get("/page/state").status == 200
    assert len(house.get("/page/history").json()["samples"]) == 1


@pytest.mark.parametrize(("after", "status"), [("", 400), ("x", 400), ("-1", 200), ("nan", 200)])
def test_history_takes_a_time(after: str, status: int) -> None:
    assert House(HouseDaemon()).get(f"/page/history?after={after}").status == status


# ---------------------------------------------------------------- logs


NO_LOGS = ("", "n", "nobody", "../m", "/etc/passwd", "m.log", "mlxsup-flight", "m\0", "mlxsup.log")


@pytest.mark.parametrize("path", ["/page/log", "/page/log/file", "/page/log/process"])
def test_log_is_named_by_a_model_and_never_by_a_path(tmp_path: Path, path: str) -> None:
    daemon = HouseDaemon()
    daemon.log_dir = str(tmp_path)
    house = House(daemon)
    for name in NO_LOGS:
        response = house.get(f"{path}?generation=1&name={quote(name)}")
        assert (response.status, response.error["param"]) == (400, "name"), name


@pytest.mark.parametrize("generation", ["", "-1", "x", "1" * 20, "\u0661"])
def test_process_is_named_by_its_number(generation: str) -> None:
    query = f"name=m&generation={quote(generation)}"
    response = House(HouseDaemon()).get(f"/page/log/process?{query}")
    assert (response.status, response.error["param"]) == (400, "generation")


def test_log_is_followed_from_where_it_was_read_last(tmp_path: Path) -> None:
    daemon = HouseDaemon()
    daemon.log_dir = str(tmp_path)
    house = House(daemon)
    log, cursor = tmp_path / "mlxsup.log", ""

    def read() -> list[str]:
        nonlocal cursor
        part = house.get(f"/page/log?name=mlxsup&cursor={cursor}").json()
        assert part["path"] == str(log)
        assert not part["has_gap"]
        cursor = part["cursor"]
        lines: list[str] = part["lines"]
        return lines

    assert read() == []
    log.write_text("one\ntwo\nhal")
    assert read() == ["one", "two"]
    assert read() == []
    with log.open("a") as file:
        file.write("f\x1b[31m\n\n")
    assert read() == ["half", ""]
    with log.open("a") as file:
        file.write("last of the old")
    log.rename(tmp_path / "mlxsup.log.1")
    assert read() == []
    log.write_text("first of the new\n")
    assert read() == ["last of the old", "first of the new"]
    log.unlink()
    assert read() == []


@pytest.mark.parametrize("cursor", ["x", "1", "1-", "-1-1", "1-99999999999999999999", "9" * 100])
def test_cursor_that_is_none_means_the_end_of_the_log(tmp_path: Path, cursor: str) -> None:
    (tmp_path / "m.log").write_text("one\n")
    assert read_part(tmp_path / "m.log", cursor).lines == ["one"]


LONG = "x" * 999
MANY = MOST_PART_BYTES // 1000


def test_part_of_a_log_is_short_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    log = tmp_path / "m.log"
    log.write_text(f"{LONG}\n" * (3 * MANY))
    first = read_part(log, "")
    assert (len(first.lines), first.has_gap, set(first.lines)) == (MANY, False, {LONG})
    with log.open("a") as file:
        file.write(f"{LONG}\n" * (2 * MANY))
    second = read_part(log, first.cursor)
    assert (len(second.lines), second.has_gap, set(second.lines)) == (MANY, True, {LONG})
    log.write_text("cut\n")
    third = read_part(log, second.cursor)
    assert (third.lines, third.has_gap) == (["cut"], True)
    log.write_text("y" * (2 * MOST_PART_BYTES))
    (line,) = read_part(log, "").lines
    assert len(line) < 5000
    assert line.endswith("more characters)")


def test_download_has_the_end_of_a_log_and_nothing_a_terminal_acts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_FILE_BYTES", 2500)
    log = tmp_path / "m.log"
    assert end_of(log) == b""
    log.write_text(f"{LONG}\n" * 5 + "\x1b]0;title\x07\u202e\n")
    assert end_of(log).split(b"\n")[:-2] == [LONG.encode()] * 2
    assert b"\x1b" not in end_of(log)
    daemon = HouseDaemon()
    daemon.log_dir = str(tmp_path)
    response = House(daemon).get("/page/log/file?name=m")
    assert response.body == end_of(log)
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/page/log", "/page/log/file"])
def test_log_that_is_no_file_is_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "m.log")
    daemon = HouseDaemon()
    daemon.log_dir = str(tmp_path)
    response = House(daemon).get(f"{path}?name=m")
    assert (response.status, response.error["code"]) == (503, "unreadable")


def test_disk_that_hangs_takes_two_threads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are answered, and read again once it answers."""
    monkeypatch.setattr(limits, "STATUS_LIMIT_S", 0.05)
    site = Site(HouseDaemon())
    headers = {TOKEN_HEADER: site.gateway.operator.token}
    is_back = threading.Event()
    began: list[Path] = []

    def hang(path: Path, cursor: str) -> logs.Part:
        began.append(path)
        assert is_back.wait(TIMEOUT_S)
        if len(began) <= page.MOST_READERS:
            raise OSError("nothing waits for this any longer")
        return logs.Part([], "", has_gap=False)

    monkeypatch.setattr("mlxsup.gateway.page.page.read_part", hang)

    async def ask_log() -> Response:
        query = "name=m"
        return await site.ask("GET", "/page/log", headers=headers, query=query, has_life=False)

    async def run() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        async with site.life():
            refused = await asyncio.gather(*(ask_log() for _ in range(10)))
            assert {one.error["message"] for one in refused} == {"the disk does not answer"}
            assert len(began) == page.MOST_READERS
            is_back.set()
            monkeypatch.setattr(limits, "STATUS_LIMIT_S", TIMEOUT_S)
            assert (await ask_log()).status == 200
        gc.collect()
        assert errors == []

    asyncio.run(run())


RULE = "--- generation {} pid 1 2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("lines", "generation", "expected"),
    [
        ([RULE.format(1), "one", RULE.format(2), "two"], 1, ["one"]),
        ([RULE.format(1), "one", RULE.format(2), "two"], 2, ["two"]),
        ([RULE.format(1), "one"], 2, []),
        ([], 1, []),
        (
            [RULE.format(1), *(f"line {n}" for n in range(100)), RULE.format(2)], 1,
            [f"line {n}" for n in range(100 - MOST_LINES, 100)],
        ),
        ([RULE.format(1), "before", RULE.format(1), "after", RULE.format(2)], 1, ["after"]),
    ],
    ids=["first", "second", "unknown", "empty", "the last lines", "of the later daemon"],
)  # fmt: skip
def test_lines_of_a_process_lie_between_its_rules(
    tmp_path: Path, lines: list[str], generation: int, expected: list[str]
) -> None:
    log = tmp_path / "m.log"
    log.write_text("".join(f"{line}\n" for line in lines))
    assert lines_of(log, generation) == expected
