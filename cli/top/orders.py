"""Carries out what was ordered with a key, and says what has become of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..connection import explain_connection_lost, explain_request_error
from ..request_ids import stage_line
from .keys import Item, Order, Verb

if TYPE_CHECKING:
    from mlxsup.client import Client

DOING = {
    Verb.RESTART: "restarting",
    Verb.LOAD: "loading",
    Verb.UNLOAD: "unloading",
    Verb.CANCEL: "cancelling",
    Verb.PAUSE: "pausing",
    Verb.RESUME: "resuming",
}
DONE = {Verb.RESTART: "restarted", Verb.LOAD: "loaded", Verb.UNLOAD: "unloaded"}


class Orders:
    """Carries out orders, each on its own thread, because some take as long as a load.

    Args:
        endpoint: of the daemon.
        say: called by any thread with what has become of an order, in one sentence.
    """

    def __init__(self, endpoint: str, say: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._say = say
        self._lock = threading.Lock()
        # Bounded by what can be selected.
        self._under_way: set[Item] = set()

    def start(self, order: Order) -> str:
        """Begins with an order; says so, or that one before it is still under way."""
        with self._lock:
            if order.item in self._under_way:
                return f"{order.item.title}: the order before this one is not done yet"
            self._under_way.add(order.item)
        name = f"mlxsup-{order.verb.value}"
        threading.Thread(target=self._run, args=(order,), name=name, daemon=True).start()
        return f"{DOING[order.verb]} {order.item.title} …"

    def _run(self, order: Order) -> None:
        from mlxsup.client import Client, ConnectionLost, RequestError

        try:
            with Client(self._endpoint) as client:
                sentence = _carry_out(client, order)
        except RequestError as error:
            sentence = f"{order.item.title}: {explain_request_error(error).message}"
        except ConnectionLost as error:
            sentence = f"{order.item.title}: {explain_connection_lost(error).message}"
        with self._lock:
            self._under_way.discard(order.item)
        self._say(sentence)


def _carry_out(client: Client, order: Order) -> str:
    name = order.item.name
    match order.verb:
        case Verb.RESTART:
            client.restart(name)
        case Verb.LOAD:
            client.load(name)
        case Verb.UNLOAD:
            client.unload(name)
        case Verb.CANCEL:
            return stage_line({**client.cancel(name), "stage": "cancelled"})
        case Verb.PAUSE:
            return stage_line(client.pause(name))
        case Verb.RESUME:
            return stage_line(client.resume(name))
    return f"{order.item.title} is {DONE[order.verb]}"
