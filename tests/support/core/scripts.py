"""Scripts of events and what the core does about them, one rule a line.

`play(driver, "exit; up; unload; wait 60 -> STOPPED & errors={r1: unloaded}")`: the process dies and
comes up again, the model is unloaded, and after a minute it is STOPPED and its request has failed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mlxsup.protocol.client_messages import Deltas, Done
from mlxsup.protocol.states import FinishReason, Priority, State, WorkerPhase
from mlxsup.protocol.worker_messages import PauseRow
from mlxsup.supervisor.core.actions import Finish, SendToWorker

from support.core.driver import Driver

EVENTS = {"up": "come_up", "wait": "pass_time"}
VALUES = {str(one): one for kind in (FinishReason, Priority, WorkerPhase) for one in kind}
WORD = re.compile(r"(?<!['\w.-])((?!(?:None|True|False)\b)[A-Za-z_][\w./-]*)(?!['\w])")
D = TypeVar("D", bound=Driver)


def play(driver: D, script: str, *verbs: Callable[..., Any]) -> D:
    """Plays events, and checks what follows an arrow.

    An event is a method of the driver, or one of the verbs, with its arguments; `up` and `wait` are
    short for two of them, `now` only moves the clock, and the body of an `ask` is its id. Checks
    are joined by `&`: a state (of `m`, or of another as `b=LOADING`), a field of the status row
    (`why=idle`, `b.why=swap`), what the event `returns`, or a look at the latest event (`errors`,
    `done`, `deltas`, `replies`, `dispatched`, `pauses`, `signals`, `spawns`, `line`, `told`,
    `finished`).
    """
    by_name = {verb.__name__: verb for verb in verbs}
    returned = None
    for step in script.split(";"):
        event, _, checks = step.partition("->")
        if event.strip():
            returned = _do(driver, by_name, *event.split())
        for check in filter(None, map(str.strip, checks.split("&"))):
            name, _, text = check.partition("=")
            actual = returned if name == "returns" else _look(driver, name)
            assert actual == _value(text or name), f"{step.strip()!r}: {name} is {actual!r}"
    return driver


def _do(driver: Driver, verbs: dict[str, Callable[..., Any]], name: str, *words: str) -> Any:
    if name == "now":
        driver.now += float(words[0])
        return None
    places = [_value(word) for word in words if "=" not in word]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    values: dict[str, Any] = {key: _value(text) for key, text in named.items()}
    if name == "ask":
        values["body"] = str(named.get("body", places[0] if places else "body")).encode()
    if name in verbs:
        return verbs[name](driver, *places, **values)
    return getattr(driver, EVENTS.get(name, name))(*places, **values)


def _look(driver: Driver, name: str) -> Any:
    if name in State.__members__:
        return str(driver.state())
    if name in driver.core.fleet.by_name:
        return str(driver.state(name))
    if name == "told":
        return [type(one.message).__name__ for one in driver.of(SendToWorker)]
    if name == "pauses":
        return [int(message.key) for message in driver.told(PauseRow)]
    if name == "finished":
        return bool(driver.of(Finish))
    if name == "signals":
        return [signal.name for signal in driver.signals()]
    if name == "errors":
        return {str(id): str(code) for id, code in driver.errors().items()}
    if name == "done":
        return {str(done.id): str(done.finish_reason) for done in driver.sent(Done)}
    if name == "deltas":
        return sum(len(message.deltas) for message in driver.sent(Deltas))
    if name in ("replies", "dispatched", "spawns", "line"):
        return getattr(driver, name)()
    model, _, field = name.rpartition(".")
    return driver.row(model or "m")[field]


def _value(text: str) -> Any:
    """Return a value of Python, in which words need no quotes."""
    if text in VALUES:
        return VALUES[text]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return ast.literal_eval(WORD.sub(r"'\1'", text)) if text[:1] in ("[", "{") else text
