"""Streams with more than one reader: who has joined which request, and what each has yet to get.

Of what was delivered before a reader came, only the token ids are kept here: the worker renders
them again. Until that has come, the pieces that follow wait for the newcomer, and so does the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlxsup.protocol.client_messages import ClientDelta, Deltas, Done, Failed
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Caller, ConnectionId, ModelName, RequestKey
from mlxsup.protocol.states import SERVES, FinishReason
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import Render, Rendered

from .actions import Outbox
from .errors import nothing_rendered, renderer_lost, too_many_readers
from .model import Model
from .requests import Request

MOST_READERS = 8
"""The most readers of one request."""

MOST_HELD_BYTES = 4 * 1024 * 1024
"""More than this does not wait for what the worker renders."""

End = Done | Failed


@dataclass(slots=True, kw_only=True, eq=False)
class _Reader:
    """A client that has joined a request.

    Attributes:
        caller: who, and under which id.
        request: which one.
        seq: how many pieces were sent so far.
        asked: the number of the question to the worker; None once it is answered, or if there was
            nothing to ask.
        delivered: the tokens that the question is about.
        held: what waits for its answer, piece by piece: tokens and body.
        held_bytes: how much that is.
        end: the end of the stream, if that waits, too.
    """

    caller: Caller
    request: Request
    seq: int = 0
    asked: int | None = None
    delivered: bytes = b""
    held: list[tuple[bytes, bytes]] = field(default_factory=list)
    held_bytes: int = 0
    end: End | None = None


class Attaching:
    """Sends streams to those who have joined them.

    Attributes:
        readers: who has joined which request.
        asking: who waits for what a worker renders, by the number of the question.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # Bounded: MOST_READERS for each open request, and those whose question is open, which ends
        # with the worker's answer or the worker.
        self._listening: dict[Caller, _Reader] = {}
        self.readers: dict[RequestKey, list[_Reader]] = {}
        self.asking: dict[int, _Reader] = {}
        self._last_number = 0

    def attach(self, model: Model, request: Request, caller: Caller) -> None:
        """Let a client join an open request.

        Raises:
            RemoteError: `invalid_request`; too many have joined it, or what was delivered cannot be
                rendered now.
        """
        readers = self.readers.get(request.key, [])
        if len(readers) >= MOST_READERS:
            raise too_many_readers(model.name, request.id, MOST_READERS)
        reader = _Reader(caller=caller, request=request)
        if request.sent.tokens:
            self._ask(model, reader)
        self._listening[caller] = reader
        self.readers.setdefault(request.key, []).append(reader)

    def listens(self, caller: Caller) -> bool:
        """True if a stream comes under this id, so that no other may."""
        return caller in self._listening

    def heard(self, rows: Sequence[Row]) -> None:
        """Pass on the pieces of a step, before anything else is done about them; those of a prompt
        are for the one who asked, because a newcomer would get the rest of them."""
        for row in rows:
            if row.body and not row.is_prompt:
                for reader in list(self.readers.get(row.key, ())):
                    self._pass_on(reader, row.tokens, row.body)

    def rendered(self, model: Model, message: Rendered) -> None:
        """Send what was delivered before a client joined, which the worker has rendered."""
        reader = self.asking.get(message.number)
        if reader is None or reader.request.model != model.name:
            return  # who asked has left since
        del self.asking[message.number]
        reader.asked = None
        if not message.bodies:
            self._fail(reader, nothing_rendered(model.name, reader.request.id))
            return
        first, *others = message.bodies
        pieces = [(reader.delivered, first), *((b"", body) for body in others), *reader.held]
        reader.delivered, reader.held = b"", []
        self._send(reader, pieces)
        if reader.end is not None:
            self._finish(reader, reader.end)

    def ended(self, request: Request, end: End) -> None:
        """Pass on the end of a request."""
        for reader in self.readers.pop(request.key, ()):
            if reader.asked is None:
                self._finish(reader, end)
            else:
                reader.end = end

    def worker_lost(self, name: ModelName) -> None:
        """Fail those whose question no worker will answer: the process of a model is gone."""
        for reader in list(self.asking.values()):
            if reader.request.model == name:
                self._fail(reader, renderer_lost(name, reader.request.id))

    def detach(self, caller: Caller) -> bool:
        """End the listening of a client; the request continues. Return whether it did listen."""
        reader = self._listening.get(caller)
        if reader is None:
            return False
        self._finish(reader, Done(id=caller.id, seq=0, finish_reason=FinishReason.CANCELLED))
        return True

    def forget(self, connection: ConnectionId) -> list[Caller]:
        """End all listening of a connection that is gone, or does not read; return what it listened
        to."""
        callers = [caller for caller in self._listening if caller.connection == connection]
        for caller in callers:
            self._remove(self._listening[caller])
        return callers

    def check_invariants(self, open_keys: Sequence[RequestKey]) -> None:
        """Raise AssertionError if a client listens to what does not come."""
        assert self.readers.keys() <= set(open_keys)
        assert all(0 < len(readers) <= MOST_READERS for readers in self.readers.values())
        listening = [reader for readers in self.readers.values() for reader in readers]
        waiting = [reader for reader in self.asking.values() if reader.end is not None]
        assert {*listening, *waiting} == set(self._listening.values())
        assert len(listening) + len(waiting) == len(self._listening)

    # ------------------------------------------------------------ inside

    def _ask(self, model: Model, reader: _Reader) -> None:
        """Ask the worker to render what was delivered.

        Raises:
            RemoteError: `invalid_request`; no worker can now.
        """
        request = reader.request
        acceptance = request.acceptance
        if model.life.state not in SERVES or model.process.is_unlinked or acceptance is None:
            raise nothing_rendered(model.name, request.id)
        self._last_number += 1
        reader.asked, reader.delivered = self._last_number, bytes(request.sent.tokens)
        self.asking[reader.asked] = reader
        question = Render(
            number=reader.asked,
            opening=acceptance.opening,
            parameters=acceptance.parameters,
            seed=acceptance.seed,
            fingerprint=acceptance.fingerprint,
            delivered=reader.delivered,
            before=acceptance.prompt_tokens[-4:],  # bytes of a token
        )
        self._outbox.tell(model, question)

    def _pass_on(self, reader: _Reader, tokens: bytes, body: bytes) -> None:
        if reader.asked is None:
            self._send(reader, [(tokens, body)])
            return
        reader.held.append((tokens, body))
        reader.held_bytes += len(tokens) + len(body)
        if reader.held_bytes > MOST_HELD_BYTES:
            self._fail(reader, renderer_lost(reader.request.model, reader.request.id))

    def _send(self, reader: _Reader, pieces: Sequence[tuple[bytes, bytes]]) -> None:
        deltas = [
            ClientDelta(id=reader.caller.id, seq=seq, tokens=tokens, body=body)
            for seq, (tokens, body) in enumerate(pieces, start=reader.seq)
        ]
        reader.seq += len(deltas)
        self._outbox.send(reader.caller.connection, Deltas(deltas=deltas))

    def _finish(self, reader: _Reader, end: End) -> None:
        id = reader.caller.id
        own = replace(end, id=id, seq=reader.seq) if isinstance(end, Done) else replace(end, id=id)
        self._outbox.send(reader.caller.connection, own)
        self._remove(reader)

    def _fail(self, reader: _Reader, error: RemoteError) -> None:
        self._outbox.fail(reader.caller, error)
        self._remove(reader)

    def _remove(self, reader: _Reader) -> None:
        del self._listening[reader.caller]
        if reader.asked is not None:
            self.asking.pop(reader.asked, None)
        readers = self.readers.get(reader.request.key)
        if readers is not None and reader in readers:
            readers.remove(reader)
            if not readers:
                del self.readers[reader.request.key]
