"""The keys and the picture of `top`: decided without a terminal, and drawn on a played one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli import top as top_app
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.output import Output
from mlxsup.cli.top import Look, Order, Screen, run
from mlxsup.client import ConnectionLost, ErrorCode, RequestError

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


def look(
    models: Sequence[dict[str, Any]] = MODELS,
    listed: Sequence[dict[str, Any]] = REQUESTS,
    pid: int = 100,
) -> Look:
    """The answers of a daemon."""
    memory = {
        "budget_bytes": 8 * GIB,
        "used_bytes": 4 * GIB,
        "may_grow_to_bytes": 6 * GIB,
        "machine_bytes": 64 * GIB,
    }
    status = {
        "version": "0.1.0", "pid": pid, "endpoint": "ipc:///tmp/run/client.sock",
        "uptime_s": 125.0, "memory": memory, "models": list(models),
    }  # fmt: skip
    return Look(status, {"requests": list(listed), "more": 0})


class Played(Screen):
    """A screen of 80 columns whose keyboard is played, and whose orders are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[tuple[str, str]] = []
        self.take(look())

    def type(self, *keys: str) -> None:
        """Press keys, and have each order done at once."""
        for key in keys:
            order = self.press(key)
            if order is not None:
                self.orders.append((order.verb, order.item.name))
                self.finish(order, f"{order.verb} done")

    def shown(self, width: int = 80, height: int = 24) -> list[str]:
        """The lines of a terminal of this size."""
        return ["".join(text for text, _ in line).rstrip() for line in self.lines(width, height)]

    @property
    def last(self) -> str:
        """The last line."""
        return self.shown()[-1]

    @property
    def marked(self) -> str | None:
        """The first word of the row that is selected."""
        return next((line.split()[1] for line in self.shown() if line.startswith("> ")), None)


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions can be answered at once, and the time stands still."""
    monkeypatch.setattr(top_app, "READ_S", 0.0)
    monkeypatch.setattr("mlxsup.cli.terminal.status.time.time", lambda: AT + 125)


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 14)], ids=str)
def test_models_requests_memory_and_events_hold_on_any_terminal(
    size: tuple[int, int], snapshot: SnapshotAssertion
) -> None:
    top = Played()
    top.type("down", "down")
    top.heard.append("12:13:20Z alpha: LOADING → READY")
    assert str(top.marked).startswith("a-model")
    assert top.shown(*size) == snapshot


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


def test_arrows_move_the_selection_and_stop_at_both_ends() -> None:
    top = Played()
    for keys, place in MOVES:
        top.type("home", "escape", *keys)
        name = None if place is None else ITEMS[place]
        assert (top.selected and top.selected.name) == name, keys


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        (["home", "l"], ("load", "alpha")),
        (["home", "r", "y"], ("restart", "alpha")),
        (["home", "u", "Y"], ("unload", "alpha")),
        (["end", "p"], ("resume", "5f-4")),
        (["end", "k", "p"], ("pause", "5f-2")),
        (["end", "k", "c", "y"], ("cancel", "5f-2")),
    ],
)
def test_each_key_gives_its_order_after_a_question_if_it_takes_something_away(
    keys: list[str], order: tuple[str, str]
) -> None:
    top = Played()
    top.type(*keys)
    assert top.orders == [order]


def test_a_question_names_what_would_be_done_and_only_y_does_it() -> None:
    top = Played()
    for key in ("n", "escape", "q", "r", "x", "down"):
        top.type("home", "u")
        assert top.last == "unload alpha? running answers finish first (y/n)"
        top.type(key)
        assert top.last == "alpha: nothing was changed"
    assert (top.orders, top.is_left, top.marked) == ([], False, "alpha")


@pytest.mark.parametrize(
    ("columns", "asked"),
    [(40, "unload a-model-with-quite-a-long…? (y/n)"), (20, "unload a-mod…? (y/n)")],
)
def test_a_narrow_terminal_shows_the_keys_that_answer_a_question(columns: int, asked: str) -> None:
    top = Played()
    top.type("home", "down", "u")
    assert top.shown(columns, 10)[-1] == asked


def test_what_is_typed_too_soon_answers_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_app, "READ_S", 3600.0)
    top = Played()
    top.type("home", "u", "y", "y")
    assert top.orders == []
    assert top.last.startswith("unload alpha?")


def test_a_key_that_fits_nothing_says_what_is_missing() -> None:
    top = Played()
    top.type("r")
    assert top.last == "nothing is selected: use the arrow keys"
    top.type("down", "c")
    assert top.last == "select a request first to use `c`"
    top.type("end", "u")
    assert top.last == "select a model first to use `u`"
    top.type("?")
    assert "c              cancel a request" in top.shown()
    top.type("l")  # leaves the help, and does nothing else
    assert (top.orders, top.marked) == ([], "4")


def test_an_order_on_what_another_still_changes_is_not_given() -> None:
    top = Played()
    top.press("home")
    order = top.press("l")
    assert isinstance(order, Order)
    assert top.press("l") is None
    assert top.last == "alpha: the previous action is still running"
    top.finish(order, "alpha is loaded")
    assert top.press("l") == order


@pytest.mark.parametrize("key", ["q", "c-d"])
def test_it_is_left_by_a_key(key: str) -> None:
    top = Played()
    top.type(key)
    assert top.is_left


def test_what_has_gone_takes_its_selection_and_its_question_with_it() -> None:
    top = Played()
    top.type("end", "up", "c")
    top.take(look(listed=[REQUESTS[0], REQUESTS[2]]))
    assert (top.marked, top.last) == (None, "5f-2 is gone")
    top.type("down")  # continues where the selection was
    assert top.marked == "4"


def test_a_daemon_that_is_gone_is_said_and_the_next_has_other_requests() -> None:
    top = Played()
    top.type("end")
    for _ in range(2):
        top.take(CliError("no daemon answers at X"))
    assert top.shown(200)[0].startswith("no daemon since ")
    assert top.shown(200)[0].endswith("Z, reconnecting: no daemon answers at X")
    assert top.marked is None
    assert any("alpha" in line for line in top.shown()), "what was known last"
    top.type("r")
    assert top.last == "nothing is selected: use the arrow keys"
    top.take(look())
    top.type("end", "c")
    top.take(look(pid=101))
    assert (top.marked, top.question) == (None, None)
    assert [line[10:] for line in top.heard] == [
        "no daemon answers",
        "the daemon answers again (pid 100)",
        "another daemon answers (pid 101)",
    ]


def test_two_requests_with_one_id_are_told_apart_by_their_numbers() -> None:
    top = Played()
    top.take(look(listed=[request("a", number="#1"), request("a", number="#2")]))
    top.type("end", "p")
    assert top.orders == [("pause", "#2")]


# ---------------------------------------------------------------- on a played terminal


class PlayedClient:
    """A daemon in this process; called as `AsyncClient` is, it gives itself.

    Attributes:
        models: that it has.
        failures: what the next looks meet, before it answers again.
        refusal: what it answers to each order; None if it carries it out.
        orders: what it was asked to do, and to which model or request.
    """

    def __init__(self, models: Sequence[dict[str, Any]] = MODELS) -> None:
        self.models = models
        self.failures: list[ConnectionLost] = []
        self.refusal: RequestError | None = None
        self.orders: list[tuple[str, str]] = []

    def __call__(self, endpoint: str) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def events(self) -> Any:
        """Report one change, and wait."""
        yield {"model": "alpha", "from": "LOADING", "to": "READY", "at": AT}
        await asyncio.Event().wait()

    async def status(self) -> Any:
        if self.failures:
            raise self.failures.pop()
        return look(self.models).status

    async def requests(self) -> Any:
        return look().requests

    def __getattr__(self, verb: str) -> Any:
        if verb not in ("restart", "load", "unload", "cancel", "pause", "resume"):
            raise AttributeError(verb)

        async def carry_out(name: str) -> dict[str, Any]:
            self.orders.append((verb, name))
            if self.refusal is not None:
                raise self.refusal
            of = {"request": name, "number": f"#{name[-1]}", "model": "alpha"}
            return {**of, "stage": f"{verb}d", "tokens_sent": 17}

        return carry_out


class Watched(Screen):
    """A screen whose keyboard is played by what it is told."""

    played: list[Watched]
    replies: dict[str, str]
    """The keys to type, by the beginning of a line that says that it is time for them."""

    def __init__(self) -> None:
        super().__init__()
        self.said_once: list[str] = []
        Watched.played.append(self)

    def lines(self, width: int, height: int) -> Any:
        """See `Screen.lines`."""
        lines = super().lines(width, height)
        for line in (self.said, *self.heard) if lines else ():
            if line not in self.said_once:
                self.said_once.append(line)
                for beginning, keys in self.replies.items():
                    if line.startswith(beginning):
                        self.send(keys)
        return lines

    def send(self, keys: str) -> None:
        """Type."""


def played(
    monkeypatch: pytest.MonkeyPatch, daemon: PlayedClient, replies: dict[str, str]
) -> Watched:
    """Run `top` on a played terminal until it ends."""
    monkeypatch.setattr(top_app, "AsyncClient", daemon)
    monkeypatch.setattr(top_app, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(top_app, "drawing_terminal", DummyOutput)
    monkeypatch.setattr(top_app, "Screen", Watched)
    Watched.played, Watched.replies = [], replies
    with create_pipe_input() as keyboard, create_app_session(input=keyboard):
        monkeypatch.setattr(Watched, "send", lambda _, keys: keyboard.send_text(keys))
        run("ipc:///played", Output())
    return Watched.played[0]


LEAVE = "q"


def test_it_hears_changes_and_follows_a_daemon_that_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxsup.cli.lock_holder.lock_holder", lambda _: None)
    daemon = PlayedClient()
    daemon.failures = [ConnectionLost("no daemon answers", endpoint="ipc:///nowhere/x.sock")]
    shown = played(monkeypatch, daemon, {"12:13:20Z alpha: LOADING → READY": LEAVE})
    assert daemon.failures == []
    assert any(line.endswith("Z no daemon answers") for line in shown.heard)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("jl", "alpha is loaded"),
        ("jjjjjp", "5f-2 (#2) of alpha: paused after 17 tokens"),
        ("jjjjjcy", "5f-2 (#2) of alpha: cancelled after 17 tokens"),
    ],
)
def test_what_has_become_of_an_order_is_said(
    monkeypatch: pytest.MonkeyPatch, keys: str, sentence: str
) -> None:
    replies = {"12:13:20Z alpha": keys, sentence: LEAVE}
    assert sentence in played(monkeypatch, PlayedClient(), replies).said_once


def test_an_order_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = PlayedClient()
    daemon.refusal = RequestError(ErrorCode.LOAD_FAILED, "no folder /\x1b[2Jq")
    shown = played(monkeypatch, daemon, {"12:13:20Z alpha": "jl", "alpha: no folder": LEAVE})
    assert daemon.orders == [("load", "alpha")]
    assert shown.said_once[-1] == "alpha: no folder /\x1b[2Jq"


def test_what_is_pasted_gives_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = PlayedClient()
    pasted = "j\x1b[200~uyy\x1b[201~"
    played(monkeypatch, daemon, {"12:13:20Z alpha": f"{pasted}{LEAVE}"})
    assert daemon.orders == []


def test_a_mistake_in_here_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[dict[str, Any]] = [{"state": "READY"}]
    with pytest.raises(KeyError, match="name"):
        played(monkeypatch, PlayedClient(odd), {})
    assert capsys.readouterr() == ("", "")
