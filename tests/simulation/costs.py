"""What the oracle knows of engine seconds: which engines worked when, and who pays for a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.worker_messages import Step

from . import shares
from .asks import Ask
from .model_names import NAMES
from .violation import check

if TYPE_CHECKING:
    from .books import Book, Life
    from .record import Record

EPSILON_S = 1e-6


BACKENDS = ("cpu", "metal")


def backend_of(model: ModelName) -> str:
    """The device of a played engine: those of the plan share one, so that leases are contended even
    if there are two of them; others have theirs for themselves."""
    return "cpu" if model in NAMES else "metal"


@dataclass(slots=True)
class Devices:
    """Which engines have worked since when: a line for each time at which that changed."""

    changes: list[tuple[float, frozenset[ModelName]]] = field(default_factory=list)

    def note(self, now: float, engines: frozenset[ModelName]) -> None:
        """From now on these engines work."""
        if not self.changes or self.changes[-1][1] != engines:
            self.changes.append((now, engines))

    def share(self, model: ModelName, since: float, now: float) -> float:
        """How much of its device a working engine was given, on average, from then until now."""
        if now <= since:
            return 1 / len(self._rivals(model, self.changes[-1][1]))
        given_s, end = 0.0, now
        for began, engines in reversed(self.changes):
            begin = max(began, since)
            if begin < end:
                given_s += (end - begin) / len(self._rivals(model, engines))
                end = begin
            if began <= since:
                break
        return given_s / (now - since)

    @staticmethod
    def _rivals(model: ModelName, engines: frozenset[ModelName]) -> frozenset[ModelName]:
        """The engines on the same device, this one included."""
        alike = {other for other in engines if backend_of(other) == backend_of(model)}
        return frozenset({model, *alike})


def step(record: Record, book: Book, life: Life, message: Step) -> None:
    """A step was reported, none of which has been entered yet."""
    since = record.now if life.works_since is None else life.works_since
    share = record.devices.share(book.name, since, record.now)
    cost_s = message.took_s * share
    if share < 1 - EPSILON_S and message.took_s:
        record.count("engines at once")
    life.works_since = record.now
    decoded = {row.key for row in message.rows[message.between_steps :]}
    computed = sum(row.computed for row in message.prefill)
    decode_s = cost_s if decoded else 0.0
    if decoded and computed:
        decode_s = cost_s * message.decode_s / message.took_s
    for key in decoded:
        _pay(record, book, life, key, decode_s / len(decoded))
    for row in message.prefill:
        ask = life.given.get(row.key)
        places = set(range(row.done - row.computed, row.done))
        known = _known(ask, places)
        if known:
            record.count("read again")
        token_s = (cost_s - decode_s) / computed
        _pay(record, book, life, row.key, len(places - known) * token_s)
        book.repeated_s += len(known) * token_s
        if ask is not None:
            ask.read |= set(range(row.done))


def _known(ask: Ask | None, places: set[int]) -> set[int]:
    """Places of a prompt that were read before, in whichever process."""
    if ask is None or not ask.is_open:
        return set()
    return places if ask.tokens else places & ask.read


def _pay(record: Record, book: Book, life: Life, key: RequestKey, seconds: float) -> None:
    book.engine_s += seconds
    ask = life.given.get(key)
    if ask is not None and ask.is_open:
        ask.engine_s += seconds
        shares.pays(record, book, ask, seconds)


def rests(life: Life) -> None:
    """What was reported may have been the last that the engine had to do, or can now."""
    if not life.given or life.turn.only_waits:
        life.works_since = None


def end(ask: Ask, message: Done | Failed) -> None:
    """A request has ended: it says what its steps have cost."""
    if isinstance(message, Done):
        said_s = message.usage.engine_s
    else:
        said_s = message.error["detail"].get("engine_s", 0.0)
    check("engine seconds", abs(said_s - ask.engine_s) < EPSILON_S, f"{ask}: {said_s}")


def compare(book: Book, row: dict[str, object]) -> None:
    """What the status says of a model."""
    for name, known_s in (("engine_s", book.engine_s), ("repeated_s", book.repeated_s)):
        said_s = row[name]
        assert isinstance(said_s, float)
        is_right = abs(said_s - known_s) < EPSILON_S
        check("engine seconds of a model", is_right, f"{book.name}: {name} {said_s}, not {known_s}")
