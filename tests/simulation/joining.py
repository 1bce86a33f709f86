"""The oracle's own account of those who have joined a stream: what each must have got by now.

Nobody is ever ahead of the request's own client or behind it, except while the worker renders what
was delivered before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import ClientDelta, Done, Failed
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.request_messages import Attach

from . import shares
from .asks import Ask
from .books import Life
from .listeners import Listener
from .violation import check

if TYPE_CHECKING:
    from .record import Record

MOST_READERS = 8
"""Of one request."""

Key = tuple[bytes, str]


class Joining:
    """Who listens to which request.

    Attributes:
        sent: every listener that any client has sent, by its connection and id.
    """

    def __init__(self) -> None:
        self.sent: dict[Key, Listener] = {}
        self._listening: dict[Key, Listener] = {}
        self._refused: set[Key] = set()

    def of(self, connection: bytes, id: str) -> Listener | None:
        """Who listens under this id; None if nobody does."""
        return self._listening.get((connection, id))

    # ------------------------------------------------------------ events

    def asked(self, record: Record, connection: bytes, message: Attach) -> None:
        """Somebody wants to join a request that only one is called, that has not too many readers,
        and whose worker can show what was delivered, if anything was."""
        key = connection, message.id
        ask = shares.named(record, message.request)
        if ask is None or self._is_full(ask) or (ask.tokens and _renderer(record, ask) is None):
            self._refused.add(key)
            record.count("attach refused")
            return
        listener = self._listening[key] = self.sent[key]
        listener.ask = ask
        if ask.tokens:
            listener.asked, listener.is_waiting = _renderer(record, ask), True
        record.count("attached later" if ask.tokens else "attached at the beginning")

    def cancelled(self, connection: bytes, id: str) -> None:
        """Somebody listens no longer, if it does."""
        listener = self.of(connection, id)
        if listener is not None:
            listener.has_left = True

    def gone(self, connection: bytes) -> None:
        """Nothing is owed to a connection that is closed."""
        for key in [key for key in self._listening if key[0] == connection]:
            del self._listening[key]

    def is_slow(self, connection: bytes) -> None:
        """A client does not read what it listens to."""
        for key, listener in self._listening.items():
            listener.is_slow |= key[0] == connection

    def rendered(self, record: Record, life: Life, message: Rendered) -> None:
        """A worker shows what was delivered, or cannot."""
        for listener in self._listening.values():
            if listener.asked is life and listener.number == message.number:
                listener.is_waiting, listener.has_nothing = False, not message.bodies
                record.count("shown to a reader")

    # ------------------------------------------------------------ actions

    def told(self, record: Record, life: Life, message: Render) -> None:
        """A worker is asked to render what a request has been sent."""
        new = [one for one in self._listening.values() if one.asked is life and one.number is None]
        check("renders for nobody", new, message)
        listener, ask = new[0], new[0].ask
        assert ask is not None
        assert ask.acceptance is not None
        accepted = ask.acceptance
        asked = message.opening, message.parameters, message.seed, message.fingerprint
        known = accepted.opening, accepted.parameters, accepted.seed, accepted.fingerprint
        check("renders another answer", asked == known, f"{listener}: {asked}, {known}")
        check("renders other tokens", message.delivered == bytes(ask.sent), listener)
        listener.number = message.number

    def sends(self, listener: Listener, delta: ClientDelta) -> None:
        """A reader is sent a piece."""
        check("reader: sent after its end", not listener.ended, listener)
        check("reader: too early", not listener.is_waiting, listener)
        listener.sent += len(delta.tokens) // 4

    def ends(self, record: Record, listener: Listener, end: Done | Failed) -> None:
        """A reader is sent its end: that of the request, or of the listening alone."""
        check("reader: ended twice", not listener.ended, listener)
        listener.ended = True
        code = f"done:{end.finish_reason}" if isinstance(end, Done) else str(end.error["code"])
        expected = self._codes(record, listener)
        check("reader: ended", code in expected, f"{listener}: {code} and not {expected}")
        record.count(f"reader ended: {code}")

    def refuses(self, connection: bytes, id: str, code: str) -> None:
        """Something fails that is no request: if it was to join one, that cannot be done."""
        if (connection, id) in self._refused:
            self._refused.remove((connection, id))
            check("attach refused otherwise", code == "invalid_request", code)

    # ------------------------------------------------------------ after an event

    def look(self, record: Record) -> None:
        """Everybody has got what there is, and whoever can get no more has its end."""
        check("attached all the same", not self._refused, self._refused)
        for key, listener in list(self._listening.items()):
            if listener.ended:
                del self._listening[key]
                continue
            check("reader: no end", not self._codes(record, listener), listener)
            if listener.is_waiting:
                check("reader: nobody renders", listener.number is not None, listener)
                continue
            assert listener.ask is not None
            is_level = listener.sent == listener.ask.tokens
            check("reader: behind", is_level, f"{listener}: {listener.sent}")

    # ------------------------------------------------------------ inside

    def _is_full(self, ask: Ask) -> bool:
        return sum(one.ask is ask for one in self._listening.values()) >= MOST_READERS

    @staticmethod
    def _codes(record: Record, listener: Listener) -> set[str]:
        """How it must end now; empty if it must not."""
        ask = listener.ask
        assert ask is not None
        codes = set()
        if listener.has_left:
            codes.add("done:cancelled")
        if listener.is_slow:
            codes.add("slow_consumer")
        if listener.has_nothing:
            codes.add("invalid_request")
        if listener.is_waiting and _is_lost(record, listener):
            codes.add("worker_crashed")
        if not (ask.is_open or listener.is_waiting):
            codes.add(_code(ask))
        return codes


def _code(ask: Ask) -> str:
    """How a request has ended; one whose client is gone counts as cancelled."""
    if ask.end is None:
        return "done:cancelled"
    return f"done:{ask.end.finish_reason}" if isinstance(ask.end, Done) else ask.code


def _renderer(record: Record, ask: Ask) -> Life | None:
    """The process that can show what a request has been sent; None if none can now."""
    book = record.books.get(ask.model)
    life = book.life if book is not None else None
    if life is None or not life.serves or life.is_abandoned or life.unlinked_at is not None:
        return None
    return life


def _is_lost(record: Record, listener: Listener) -> bool:
    """Whether the process that was asked is gone."""
    life = listener.asked
    assert life is not None
    return record.life_of(life.model, life.generation) is not life
