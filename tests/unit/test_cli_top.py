"""The keys and the picture of `top`, on a terminal that textual plays."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self

import pytest
from syrupy.assertion import SnapshotAssertion
from textual.pilot import Pilot
from textual.widgets import Static

from mlxsup.cli import top as top_app
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.output import Output
from mlxsup.cli.top import Look, Top, run
from mlxsup.client import ConnectionLost, ErrorCode, RequestError

from support.eventually_async import eventually_async

GIB = 2**30
AT = 1_763_900_000.0


def model(name: str, state: str = "READY", **values: Any) -> dict[str, Any]:
    return {
        "name": name, "state": state, "generation": 1, "pid": 4711, "restarts": 0,
        "last_exit": None, "retry_in_s": None, "progress": None, "queued": 0, "running": [],
        "tokens_per_s": 93.4, "footprint_bytes": 2 * GIB, "context_length": 8192,
        "loaded_for_s": 3725.0, **values,
    }  # fmt: skip


def request(id: str, state: str = "answering", **values: Any) -> dict[str, Any]:
    return {
        "id": id, "number": f"#{id.rpartition('-')[2]}", "model": "alpha",
        "client": "process 4711@77", "state": state,
        "place": 1 if state == "waiting" else None,
        "reason": "rows" if state == "waiting" else None,
        "prefill": 0.41 if state == "reading" else None,
        "expected_s": 12.0 if state in ("waiting", "reading") else None,
        "tokens_sent": 17, "tokens_per_s": 31.5 if state == "answering" else None,
        "engine_s": 1.5, **values,
    }  # fmt: skip


class PlayedDaemon:
    """A daemon in this process; called as `Client` is, it gives a client of itself.

    Attributes:
        is_gone: whether nothing answers.
        refusal: what it answers to each order; None if it carries it out.
        orders: what it was asked to do, and to which model or request.
    """

    def __init__(self, models: list[dict[str, Any]], listed: list[dict[str, Any]]) -> None:
        self.models = models
        self.listed = listed
        self.pid = 100
        self.is_gone = False
        self.refusal: RequestError | None = None
        self.orders: list[tuple[str, str]] = []

    def __call__(self, endpoint: str) -> PlayedClient:
        return PlayedClient(self)


class PlayedClient:
    def __init__(self, daemon: PlayedDaemon) -> None:
        self.daemon = daemon
        self._changes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.put(None)

    def events(self) -> Iterator[dict[str, Any]]:
        """Report one change, and wait for the end of the client."""
        self._changes.put({"model": "alpha", "from": "LOADING", "to": "READY", "at": AT})
        return iter(self._changes.get, None)

    def ping(self) -> None:
        if self.daemon.is_gone:
            raise ConnectionLost("no daemon answers at X", endpoint="ipc:///nowhere/x.sock")

    def status(self) -> dict[str, Any]:
        self.ping()
        memory = {
            "budget_bytes": 8 * GIB,
            "used_bytes": 4 * GIB,
            "may_grow_to_bytes": 6 * GIB,
            "machine_bytes": 64 * GIB,
        }
        return {
            "version": "0.1.0", "pid": self.daemon.pid, "endpoint": "ipc:///tmp/run/client.sock",
            "uptime_s": 125.0, "memory": memory, "models": [dict(m) for m in self.daemon.models],
        }  # fmt: skip

    def requests(self) -> dict[str, Any]:
        return {"requests": [dict(one) for one in self.daemon.listed], "more": 0}

    def __getattr__(self, verb: str) -> Any:
        if verb not in ("restart", "load", "unload", "cancel", "pause", "resume"):
            raise AttributeError(verb)

        def carry_out(name: str) -> dict[str, Any]:
            self.daemon.orders.append((verb, name))
            if self.daemon.refusal is not None:
                raise self.daemon.refusal
            of = {"request": name, "number": f"#{name[-1]}", "model": "alpha"}
            return {**of, "stage": f"{verb}d", "tokens_sent": 17}

        return carry_out


KILLED = {
    "reason": "crash", "code": None, "signal": "SIGKILL", "detail": "out of memory", "at": AT,
}  # fmt: skip
MODELS = [
    model("alpha", running=["5f-1"], queued=1),
    model("a-model-with-quite-a-long-name", "BACKOFF", retry_in_s=4.0, last_exit=KILLED, pid=None),
    model("cold", "STOPPED", pid=None, tokens_per_s=None, footprint_bytes=0, loaded_for_s=None),
]
REQUESTS = [request("5f-1"), request("5f-2", "reading"), request("5f-4", "paused")]
ITEMS = [model["name"] for model in MODELS] + [request["id"] for request in REQUESTS]

Scene = Callable[["Played"], Awaitable[None]]


class Played:
    """`top`, its keyboard and the daemon that it shows."""

    def __init__(self, app: Top, pilot: Pilot[int], daemon: PlayedDaemon) -> None:
        self.app = app
        self.daemon = daemon
        self._pilot = pilot

    async def press(self, *keys: str) -> None:
        """Type keys one after the other, each answer only once its question is there."""
        for key in keys:
            if self.app.question is not None:
                await eventually_async(lambda: self.app.is_asked)
            await self._pilot.press(key)

    async def paste(self, text: str) -> None:
        """Type keys all at once."""
        await self._pilot.press(*text)

    async def look(self, **change: str) -> None:
        """Have the daemon looked at, or missed."""
        client = self.daemon("ipc:///played")
        try:
            news: Look | CliError = Look(
                at=AT,
                status=client.status(),
                requests=client.requests(),
                changes=[{"at": AT, **change}] if change else [],
            )
        except ConnectionLost as error:
            news = CliError(error.message)
        self.app.take(news)
        await self._pilot.pause()

    @property
    def lines(self) -> list[str]:
        """What the terminal shows."""
        return [
            widget.render_line(row).text.rstrip()
            for widget in self.app.query(Static)
            if widget.display
            for row in range(widget.size.height)
        ]

    @property
    def last(self) -> str:
        """The last line."""
        return self.lines[-1]

    @property
    def marked(self) -> str | None:
        """The first word of the row that is selected."""
        return next((line.split()[1] for line in self.lines if line.startswith("> ")), None)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what plays a scene."""
    monkeypatch.setattr(top_app, "READ_S", 0.001)
    monkeypatch.setattr("mlxsup.cli.terminal.status.time.time", lambda: AT + 125)

    def play(scene: Scene, size: tuple[int, int] = (80, 24)) -> None:
        daemon = PlayedDaemon([dict(one) for one in MODELS], [dict(one) for one in REQUESTS])
        monkeypatch.setattr("mlxsup.client.Client", daemon)
        monkeypatch.setattr(Top, "_follow", lambda app: None)

        async def played() -> None:
            app = Top("ipc:///played")
            async with app.run_test(size=size) as pilot:
                on_stage = Played(app, pilot, daemon)
                await on_stage.look()
                await scene(on_stage)
            assert app.failure is None

        asyncio.run(played())

    return play


def on_stage(scene: Scene) -> Callable[..., None]:
    """Make a test of what is played on a terminal of 80 columns."""

    def test(play: Callable[..., None]) -> None:
        play(scene)

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 14)], ids=str)
def test_models_requests_memory_and_events_hold_on_any_terminal(
    play: Callable[..., None], size: tuple[int, int], snapshot: SnapshotAssertion
) -> None:
    async def scene(top: Played) -> None:
        await top.press("down", "down")
        await top.look(model="alpha", **{"from": "LOADING", "to": "READY"})
        assert str(top.marked).startswith("a-model")
        assert top.lines == snapshot

    play(scene, size)


MOVES = [
    ([], None),
    (["down"], 0),
    (["j", "j"], 1),
    (["up"], 0),
    (["down", "up", "up"], 0),
    (["end"], 5),
    (["end", "down"], 5),
    (["end", "k"], 4),
    (["down", "pagedown"], 5),
    (["end", "pageup"], 0),
    (["end", "escape", "up"], 5),
]


@on_stage
async def test_arrows_move_the_selection_and_stop_at_both_ends(top: Played) -> None:
    for keys, place in MOVES:
        await top.press("home", "escape", *keys)
        name = None if place is None else ITEMS[place]
        assert (top.app.selected and top.app.selected.name) == name, keys


def test_each_key_gives_its_order_after_a_question_if_it_takes_something_away(
    play: Callable[..., None],
) -> None:
    cases = [
        (["home", "l"], "load", "alpha", "alpha is loaded"),
        (["home", "r", "y"], "restart", "alpha", "alpha is restarted"),
        (["home", "u", "Y"], "unload", "alpha", "alpha is unloaded"),
        (["end", "p"], "resume", "5f-4", "5f-4 (#4) of alpha: resumed after 17 tokens"),
        (["end", "k", "p"], "pause", "5f-2", "5f-2 (#2) of alpha: paused after 17 tokens"),
        (["end", "k", "c", "y"], "cancel", "5f-2", "5f-2 (#2) of alpha: cancelled after 17 tokens"),
    ]

    async def scene(top: Played) -> None:
        for keys, verb, name, sentence in cases:
            await top.press(*keys)
            await eventually_async(lambda said=sentence: top.last == said)  # type: ignore[misc]
            assert top.daemon.orders.pop() == (verb, name)
        assert top.daemon.orders == []

    play(scene)


@on_stage
async def test_a_question_names_what_would_be_done_and_only_y_does_it(top: Played) -> None:
    for key in ("n", "escape", "q", "r", "x", "down"):
        await top.press("home", "u")
        assert top.last == "unload alpha? running answers finish first (y/n)"
        await top.press(key)
        assert top.last == "alpha: nothing was changed"
    assert (top.daemon.orders, top.app.is_running, top.marked) == ([], True, "alpha")


@pytest.mark.parametrize(
    ("columns", "asked"),
    [(40, "unload a-model-with-quite-a-long…? (y/n)"), (20, "unload a-mod…? (y/n)")],
)
def test_a_narrow_terminal_shows_the_keys_that_answer_a_question(
    play: Callable[..., None], columns: int, asked: str
) -> None:
    async def scene(top: Played) -> None:
        await top.press("home", "down", "u")
        assert top.last == asked

    play(scene, (columns, 10))


def test_what_is_pasted_answers_no_question(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(top: Played) -> None:
        monkeypatch.setattr(top_app, "READ_S", 3600.0)
        await top.press("home")
        await top.paste("uyy")
        assert top.daemon.orders == []
        assert top.last.startswith("unload alpha?")

    play(scene)


@on_stage
async def test_a_key_that_fits_nothing_says_what_is_missing(top: Played) -> None:
    await top.press("r")
    assert top.last == "nothing is selected: use the arrow keys"
    await top.press("down", "c")
    assert top.last == "select a request first to use `c`"
    await top.press("end", "u")
    assert top.last == "select a model first to use `u`"
    await top.press("?")
    assert "c              cancel a request" in top.lines
    await top.press("l")  # leaves the help, and does nothing else
    assert (top.daemon.orders, top.marked) == ([], "4")


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+d"])
def test_it_is_left_by_a_key(play: Callable[..., None], key: str) -> None:
    async def scene(top: Played) -> None:
        await top.press(key)
        assert not top.app.is_running

    play(scene)


@on_stage
async def test_what_has_gone_takes_its_selection_and_its_question_with_it(top: Played) -> None:
    await top.press("end", "up", "c")
    del top.daemon.listed[1]
    await top.look()
    assert (top.marked, top.last) == (None, "5f-2 is gone")
    await top.press("down")  # continues where the selection was
    assert top.marked == "4"


@on_stage
async def test_a_daemon_that_is_gone_is_said_and_the_next_has_other_requests(
    top: Played,
) -> None:
    await top.press("end")
    top.daemon.is_gone = True
    await top.look()
    await top.look()
    assert top.lines[0].startswith("no daemon since ")
    assert top.lines[0].endswith("Z, reconnecting: no daemon answers at X")
    assert top.marked is None
    assert any("alpha" in line for line in top.lines), "what was known last"
    await top.press("r")
    assert top.last == "nothing is selected: use the arrow keys"
    top.daemon.is_gone = False
    await top.look()
    await top.press("end", "c")
    top.daemon.pid = 101
    await top.look()
    assert (top.marked, top.app.question) == (None, None)
    assert [line[10:] for line in top.lines if "Z " in line] == [
        "no daemon answers",
        "the daemon answers again (pid 100)",
        "another daemon answers (pid 101)",
    ]


def test_it_follows_a_daemon_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = PlayedDaemon(MODELS, REQUESTS)
    monkeypatch.setattr("mlxsup.client.Client", daemon)
    monkeypatch.setattr(top_app, "RETRY_S", 0.1)
    monkeypatch.setattr(top_app, "LOOK_INTERVAL_S", 0.1)

    async def followed() -> None:
        app = Top("ipc:///played")
        async with app.run_test():
            await eventually_async(lambda: app.look and app.heard)
            assert list(app.heard) == ["12:13:20Z alpha: LOADING → READY"]
            daemon.is_gone = True
            await eventually_async(lambda: app.lost)
            daemon.is_gone = False
            await eventually_async(lambda: not app.lost)

    asyncio.run(followed())


@on_stage
async def test_two_requests_with_one_id_are_told_apart_by_their_numbers(top: Played) -> None:
    top.daemon.listed[:] = [request("a", number="#1"), request("a", number="#2")]
    await top.look()
    await top.press("end", "p")
    await eventually_async(lambda: top.daemon.orders == [("pause", "#2")])


@on_stage
async def test_an_order_that_is_refused_says_why_and_another_can_follow(top: Played) -> None:
    top.daemon.refusal = RequestError(ErrorCode.LOAD_FAILED, "no folder /\x1b[2Jq")
    await top.press("home", "l")
    await eventually_async(lambda: top.last == "alpha: no folder /␛[2Jq")
    top.daemon.refusal = None
    await top.press("l")
    await eventually_async(lambda: top.last == "alpha is loaded")


def test_a_mistake_in_here_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[dict[str, Any]] = [{"state": "READY"}]
    monkeypatch.setattr("mlxsup.client.Client", PlayedDaemon(odd, []))
    monkeypatch.setattr(Top, "run", lambda app, **_: asyncio.run(headless(app)))

    async def headless(app: Top) -> None:
        await app.run_async(headless=True)

    with pytest.raises(KeyError, match="name"):
        run("ipc:///played", Output())
    assert capsys.readouterr() == ("", "")
