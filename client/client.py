"""The synchronous client, which several threads may use at once; one thread owns its connection."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import zmq

from mlxsup.protocol.client_messages import Subscribe
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Command

from .api import ClientBase, GenerateParameters, RequestOptions
from .connection import Connection
from .parameters import answer_limit_s, unanswered
from .results import Delta, Notice, Result
from .session import Item, Owner
from .streams import ENDS_OF_READING, OnNotice, StreamBase, SubscriptionBase, is_end, value_of
from .vectors import (
    Embeddings,
    Ranking,
    embed_body,
    embeddings_of,
    ranking_of,
    rerank_body,
)

SIGNAL_CHECK_S = 1.0


class SyncInbox(queue.SimpleQueue[Item]):
    """Holds the items that come for one request, in the process that sent it."""

    def __init__(self) -> None:
        self._owner = Owner()

    def take(self) -> Item:
        """Return the next item; Ctrl-C raises within a second. The end stays, for each reader.

        Raises:
            RuntimeError: this process was forked, and has no thread that fills the inbox.
        """
        while True:
            self._owner.check()
            try:
                # Without a limit, a signal that comes just before the thread blocks is not seen
                # until the next item: Python's handler only sets a flag, which a lock does not
                # look at.
                item = self.get(timeout=SIGNAL_CHECK_S)
            except queue.Empty:
                continue
            if is_end(item):
                self.put(item)
            return item


class Stream(StreamBase):
    """An answer under way: iterate over its pieces. For one thread at a time, except `cancel`.

    As a context manager, it cancels the request if it has not ended when the block is left. Ctrl-C
    while it waits for a piece cancels it too.
    """

    def __init__(
        self,
        request_id: RequestId,
        inbox: SyncInbox,
        cancel: Callable[[RequestId], None],
        on_notice: OnNotice | None,
    ) -> None:
        super().__init__(request_id, cancel, on_notice)
        self._inbox = inbox

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._end is not None:
            raise StopIteration
        try:
            while isinstance(item := self._inbox.take(), Notice):
                self._tell(item)
        except ENDS_OF_READING:
            self.cancel()
            raise
        delta = self._take(item)
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class EventStream(SubscriptionBase):
    """State changes from the call on, as maps; `close` ends it."""

    def __init__(
        self, request_id: RequestId, inbox: SyncInbox, cancel: Callable[[RequestId], None]
    ) -> None:
        super().__init__(request_id, cancel)
        self._inbox = inbox

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._is_closed:
            raise StopIteration
        change = self._take(self._inbox.take())
        if change is None:
            raise StopIteration
        return change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Task = Callable[[Connection], None]


class IoThread:
    """Runs a connection, as sockets are not thread-safe: carries out what others post, and pumps.

    Args:
        endpoint: where the supervisor listens.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.owner = Owner()
        # Bounded by what the client's owner has open at once.
        self._tasks: deque[Task] = deque()
        self._is_closing = False
        # Reentrant, because a signal handler may cancel while its thread is in here.
        self._lock = threading.RLock()
        # Not a pair of sockets: every command would wait for the module.
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        self._woken, self._waker = open(ends[0], "rb", 0), open(ends[1], "wb", 0)  # noqa: SIM115
        # A daemon thread: a client that was not closed must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="mlxsup-client", daemon=True)
        self._thread.start()

    def post(self, task: Task) -> bool:
        """Make the thread call this with its connection; False if the client is closed.

        Never blocks on the connection, and does nothing in a forked process.
        """
        if self.owner.is_forked:  # there, the lock may be held for ever
            return False
        with self._lock:
            if self._is_closing:
                return False
            self._tasks.append(task)
            self._wake()
        return True

    def close(self) -> None:
        """End what is open, flush, and end the thread; a second time does nothing."""
        if self.owner.is_forked:  # what is open belongs to the other process
            return
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._wake()
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def _wake(self) -> None:
        self._waker.write(b"\0")  # a full pipe takes none, and has woken the thread already

    def _run(self) -> None:
        connection = Connection(self._endpoint)
        try:
            while not self._is_closing:
                self._run_tasks(connection)
                is_more = connection.pump()
                self._wait(connection, is_more)
        finally:
            # Even if the loop above broke, no reader may wait for an answer for ever.
            with self._lock:
                self._is_closing = True
            self._run_tasks(connection)
            connection.close()
            connection.terminate()

    def _run_tasks(self, connection: Connection) -> None:
        while self._tasks:
            self._tasks.popleft()(connection)

    def _wait(self, connection: Connection, is_more: bool) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        link = connection.link
        if link is not None:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        timeout_ms: int | None = None
        if is_more:
            timeout_ms = 0
        elif (delay_s := connection.delay_s) is not None:
            timeout_ms = int(delay_s * 1000) + 1
        poller.poll(timeout_ms)
        while self._woken.read(4096):
            pass


class Client(ClientBase[Stream, dict[str, Any]]):
    """A client of one daemon, for programs without an event loop."""

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(endpoint)
        self._thread = IoThread(self._endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is open, and end the connection."""
        self._thread.close()

    def complete(self, model: str, **parameters: Unpack[GenerateParameters]) -> Result:
        """Return the whole answer; takes the arguments of `generate`.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        return self._read_out(self.generate(model, **parameters))

    def embed(
        self,
        model: str,
        texts: Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        input_type: str | None = None,
        truncate: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Embeddings:
        """Return the embeddings of texts.

        Args:
            model: the embedding model.
            texts: up to 2,048 of them; each text, or a list of token ids that is used as it is.
            dimensions: only so many of the first numbers of each, for models that allow it.
            input_type: the kind of text, as the model's makers call it: `query`, `document`.
            truncate: whether a text that is too long is cut; otherwise it is refused.
            options: those of `generate` that concern every request.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        body = embed_body(texts, dimensions, input_type, truncate)
        return embeddings_of(self._read_out(self._send(model, body, **options)))

    def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool | None = True,
        **options: Unpack[RequestOptions],
    ) -> Ranking:
        """Return documents in the order in which they answer a query.

        Args:
            model: the reranking model.
            query: what is asked.
            documents: up to 2,048 texts.
            top_n: only so many of the best; None: all.
            truncate: whether a document that is too long is cut, as it is by default.
            options: those of `generate` that concern every request.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        body = rerank_body(query, documents, truncate)
        return ranking_of(self._read_out(self._send(model, body, **options)), top_n)

    def events(self) -> EventStream:
        """Return the changes of states from now on."""
        subscribe = Subscribe(id=self._ids.next())
        inbox = self._post(subscribe, is_subscription=True)
        return EventStream(subscribe.id, inbox, self._cancel)

    @staticmethod
    def _read_out(stream: Stream) -> Result:
        with stream:
            for _ in stream:
                pass
        return stream.result

    def _call(self, message: Command, *, wait: bool = True) -> dict[str, Any]:
        inbox = self._post(message)
        if not wait:
            # The daemon answers in order: a refusal would be here before this answer is.
            self.ping()
            if inbox.empty():
                return {}
        if (limit_s := answer_limit_s(message)) is None:
            return value_of(inbox.take())
        until = time.monotonic() + limit_s
        while True:
            try:
                return value_of(inbox.get(timeout=SIGNAL_CHECK_S))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise unanswered(message, self._endpoint) from None

    def _post(self, message: Command, *, is_subscription: bool = False) -> SyncInbox:
        inbox, frames = SyncInbox(), encode(message)

        def task(connection: Connection) -> None:
            connection.open_command(message.id, frames, inbox, is_subscription=is_subscription)

        self._must_post(task)
        return inbox

    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> Stream:
        inbox = SyncInbox()
        self._must_post(lambda connection: connection.open_stream(request_id, frames, inbox))
        return Stream(request_id, inbox, self._cancel, on_notice)

    def _must_post(self, task: Callable[[Connection], None]) -> None:
        if not self._thread.post(task):
            self._thread.owner.check()
            raise RuntimeError("the client is closed")

    def _cancel(self, request_id: RequestId) -> None:
        # Once the client is closed, everything is cancelled already.
        self._thread.post(lambda connection: connection.cancel(request_id))
