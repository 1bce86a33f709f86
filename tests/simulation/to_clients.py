"""Whether what the core tells clients was called for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import (
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Notice,
    Prioritize,
    Reload,
    Reply,
    Restart,
    StatusQuery,
    Unload,
)
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import (
    CancelRequest,
    PauseRequest,
    RequestsQuery,
    ResumeRequest,
)
from mlxsup.protocol.states import NoticeKind
from mlxsup.supervisor.core.events import ClientSaid

from . import costs, higher, listings, memory, pressure, shares, swaps
from .asks import Ask
from .violation import Violation, check

if TYPE_CHECKING:
    from .record import Record


def judge(record: Record, connection: bytes, message: Message) -> None:
    """Raises Violation if a client is sent something that was not called for."""
    match message:
        case Deltas(deltas=deltas):
            check("pieces to nobody", connection not in record.gone, connection)
            for delta in deltas:
                listener = record.joining.of(connection, delta.id)
                if listener is not None:
                    record.joining.sends(listener, delta)
                else:
                    _delta(record, record.asks[connection, delta.id], delta)
        case Done(id=id) | Failed(id=id) if listener := record.joining.of(connection, id):
            record.joining.ends(record, listener, message)
        case Done(id=id, finish_reason=reason):
            _end(record, record.asks[connection, id], message, f"done:{reason}")
        case Failed(id=id, error=error):
            ask = record.asks.get((connection, id))
            record.is_answered(connection, id)
            record.options.fails(connection, id)
            record.log_levels.fails(connection, id)
            record.joining.refuses(connection, id, error["code"])
            _refused(record, connection, id, error["code"])
            if error["code"] == "duplicate_id":
                check("refused as duplicate", record.is_twin, id)
                record.is_twin = False
            elif ask is not None:
                _end(record, ask, message, error["code"])
            elif record.is_unique.get((connection, id)):
                raise Violation("not prioritized", f"{id}: {error}")
            elif (connection, id) in record.may:
                check("pause refused", not record.may[connection, id], f"{id}: {error}")
                check("pause refused otherwise", error["code"] == "invalid_request", error)
        case Reply(id=id, value=value):
            _reply(record, connection, id, value)
        case Notice(id=id, kind=kind, detail=detail):
            ask = record.asks[connection, id]
            check("notice to nobody", ask.is_open, id)
            if kind is NoticeKind.QUEUED:
                book = record.books[ask.model]
                check("queued without waiting", ask in book.queue, ask)
                shares.check_place(record, book, ask, detail["position"])
            elif kind is NoticeKind.PAUSED:
                check("paused without being so", ask.paused_at is not None, f"{ask}: {detail}")
            if kind in (NoticeKind.QUEUED, NoticeKind.PAUSED):
                higher.notified(record, record.books[ask.model], ask, kind, detail)
            elif kind is NoticeKind.RESUMED:
                times = ask.resumed if detail["after"] == "crash" else ask.paused
                check("resumes told", detail["times"] == times, f"{ask}: {detail}")
        case Event(id=id):
            check("event to nobody", connection not in record.gone, id)


def _refused(record: Record, connection: bytes, id: str, code: str) -> None:
    """A request that comes may be refused: it is logged as such."""
    event, ask = record.event, record.asks.get((connection, id))
    if not isinstance(event, ClientSaid) or not isinstance(event.message, Generate):
        return
    is_it = (bytes(event.connection), event.message.id) == (connection, id)
    if is_it and (ask is None or not ask.number or code == "duplicate_id"):
        record.log_lines.refused(id, code)


def _delta(record: Record, ask: Ask, delta: ClientDelta) -> None:
    check("delta after the end", ask.is_open, ask)
    check("delta from nowhere", bool(record.deltas), ask)
    pairs = [pair for pair in record.deltas if pair[0] is ask]
    check("delta from nowhere", bool(pairs), ask)
    record.deltas.remove(pairs[0])
    row = pairs[0][1]
    check("delta changed", (delta.tokens, delta.body) == (row.tokens, row.body), ask)
    ask.sent += delta.tokens


def _end(record: Record, ask: Ask, message: Done | Failed, code: str) -> None:
    check("ended twice", ask.is_open, f"{ask}: {code}")
    expected = set(record.must.get(ask, ()))
    if ask.is_stranded and ask.tokens:
        expected.add("insufficient_memory")
    if code not in expected:
        name = "ended: " + code.removeprefix("done:")
        raise Violation(name, f"{ask}: {code} and not {sorted(expected)}; {message}")
    ask.end = message
    costs.end(ask, message)
    if isinstance(message, Failed) and "tokens_sent" in message.error["detail"]:
        sent = message.error["detail"]["tokens_sent"]
        check("tokens_sent", sent == ask.tokens, f"{ask}: {sent}")
    record.close(ask)
    record.count("ended: " + code)


def _reply(record: Record, connection: bytes, id: str, value: dict[str, object]) -> None:
    message, at = record.commands[connection, id]
    record.is_answered(connection, id)
    match message:
        case Load(model=model, dry_run=True):
            record.options.check_answer(connection, id)
            target = record.books[model]
            is_unseen = target.life is not None and swaps.may_have_begun(record, target)
            if not (is_unseen and value["outcome"] == "waits"):
                memory.check_forecast(record, target, value)
        case Reload():
            said = {name: value[name] for name in ("added", "removed")}
            check("changes of a reload", said == record.changes, f"{said} {record.changes}")
        case Load(model=model) | Restart(model=model):
            record.options.check_answer(connection, id)
            life = record.books[model].life
            is_ready = life is not None and life.ready_at is not None and life.cause is None
            check("load answered early", is_ready, message)
            if isinstance(message, Restart) and life is not None:
                check("restart answered early", (life.ready_at or 0.0) >= at, message)
        case Unload(model=model):
            book = record.books.get(model)
            check("unload answered early", book is None or book.life is None, message)
        case RequestsQuery(client=client):
            listings.compare(record, client, value)
        case CancelRequest():
            check("cancelled nobody", record.is_unique[connection, id], message)
        case PauseRequest() | ResumeRequest():
            check("pause allowed", record.may[connection, id], message)
        case StatusQuery():
            _compare(record, value)
        case Prioritize():
            check("prioritized nobody", record.is_unique[connection, id], message)
            check("another class", value["priority"] == message.priority, value)


def _compare(record: Record, value: dict[str, object]) -> None:
    """The status says what the oracle knows."""
    said = value["memory"]
    assert isinstance(said, dict)
    pressure.compare(record, said)
    rows = value["models"]
    assert isinstance(rows, list)
    check("status names all", {row["name"] for row in rows} == set(record.books), rows)
    for row in rows:
        book = record.books[row["name"]]
        book.suspicion.forget(record.now)
        quarantined = len(book.suspicion.quarantined)
        check("status: quarantined", row["quarantined"] == quarantined, row)
        check("status: queued", row["queued"] == len(book.queue), row)
        memory.check_row(record, book, row)
        record.downloads.check_row(book, row)
        given = book.life.given.values() if book.life else ()
        running = [ask.id for ask in given if ask.is_open]
        check("status: running", sorted(row["running"]) == sorted(running), row)
        paused = sorted(ask.id for ask in book.paused)
        check("status: paused", sorted(row["paused"]) == paused, row)
        check("status: failed", (row["state"] == "FAILED") == bool(book.failed), row)
        check("status: pid", row["pid"] == (book.life.pid if book.life else None), row)
        check("status: suspects", row["suspects"] <= len(book.suspicion.suspects) + 8, row)
        costs.compare(book, row)
    queue = value["queue"]
    assert isinstance(queue, dict)
    shares.compare(record, queue)
