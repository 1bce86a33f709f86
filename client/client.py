"""The synchronous client; several threads may use one at once."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from mlxsup.protocol.client_messages import (
    Ping,
    Reload,
    RemoveModel,
    Restart,
    SettingsQuery,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
)
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import PauseRequest, ResumeRequest

from .api import GenerateParameters, RequestOptions, TokenizeParameters
from .connection import Connection
from .io_thread import IoThread
from .parameters import (
    Command,
    add_model,
    answer_limit_s,
    check_limit,
    check_model,
    check_request,
    configure,
    encode_command,
    load,
    prioritize,
    unanswered,
)
from .request_commands import RequestCommands
from .results import Delta, Notice, Result
from .session import Item
from .streams import ENDS_OF_READING, OnNotice, StreamBase, SubscriptionBase, value_of
from .vectors import (
    Embeddings,
    Ranking,
    embed_body,
    embeddings_of,
    ranking_of,
    rerank_body,
)

SyncInbox = queue.SimpleQueue[Item]

SIGNAL_CHECK_S = 1.0


def _take_from(inbox: SyncInbox) -> Item:
    """Return the next item; Ctrl-C raises within a second."""
    while True:
        try:
            # Without a limit, a signal that comes just before the thread blocks is not seen until
            # the next item: Python's handler only sets a flag, which a lock does not look at.
            return inbox.get(timeout=SIGNAL_CHECK_S)
        except queue.Empty:
            continue


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
            while isinstance(item := _take_from(self._inbox), Notice):
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
        change = self._take(_take_from(self._inbox))
        if change is None:
            raise StopIteration
        return change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(RequestCommands[Stream]):
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
        """Cancels what is open and ends the connection."""
        self._thread.close()

    def complete(self, model: str, **parameters: Unpack[GenerateParameters]) -> Result:
        """Returns the whole answer; takes the arguments of `generate`.

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
        """Returns the embeddings of texts.

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
        return embeddings_of(self._read_out(self.stream_vectors(model, body, options)))

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
        """Returns documents in the order in which they answer a query.

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
        return ranking_of(self._read_out(self.stream_vectors(model, body, options)), top_n)

    @staticmethod
    def _read_out(stream: Stream) -> Result:
        with stream:
            for _ in stream:
                pass
        return stream.result

    def tokenize(self, model: str, **parameters: Unpack[TokenizeParameters]) -> list[int]:
        """Returns the ids of a prompt, as `generate` would make them of the same arguments.

        Nothing is computed; the model is loaded if need be.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        with self._tokenizing(model, ids=True, **parameters) as stream:
            for _ in stream:
                pass
        return stream.result.prompt_token_ids

    def detokenize(self, model: str, tokens: list[int]) -> str:
        """Returns the text of token ids, special ones included.

        Raises:
            RequestError, ConnectionLost: the request ended with this error.
        """
        with self._tokenizing(model, ids=False, prompt_tokens=tokens) as stream:
            for _ in stream:
                pass
        return stream.result.prompt

    def ping(self) -> dict[str, Any]:
        """Returns once the daemon has answered."""
        return self._call(Ping(id=self._ids.next()))

    def status(self, *, debug: bool = False) -> dict[str, Any]:
        """Returns what `mlxsup status --json` prints; `debug` adds each model's latest events."""
        return self._call(StatusQuery(id=self._ids.next(), debug=debug))

    def load(
        self,
        model: str,
        *,
        dry_run: bool = False,
        keep_alive: float | None = None,
        context_length: int | None = None,
    ) -> dict[str, Any]:
        """Returns once the model is READY.

        Args:
            model: which one.
            dry_run: change nothing, and return at once what the load would lead to: `outcome`
                (`loaded`, `fits`, `evicts`, `swaps` or `waits`), `evicts` and `swaps` (names),
                `needed_bytes` and `reason`. A load that would be refused raises its error.
            keep_alive: as for `generate`, but above 0.
            context_length: tokens of prompt and answer together, 0 for the model's own limit, until
                the configuration is read again; None: as it is. Another one takes a new process.
        """
        message = load(
            self._ids.next(),
            model,
            dry_run=dry_run,
            keep_alive=keep_alive,
            context_length=context_length,
        )
        return self._call(message)

    def unload(self, model: str) -> dict[str, Any]:
        """Returns once the model's process is gone."""
        return self._call(Unload(id=self._ids.next(), model=check_model(model)))

    def restart(self, model: str, *, now: bool = False, wait: bool = True) -> dict[str, Any]:
        """Returns once the model is READY in a new process.

        Args:
            model: which one.
            now: whether to cut running requests off.
            wait: False to return as soon as the daemon has accepted it.
        """
        restart = Restart(id=self._ids.next(), model=check_model(model), now=now)
        inbox = self._post(restart, restart.id)
        if not wait:
            # The daemon answers in order: a refusal would be here before this answer is.
            self.ping()
            if inbox.empty():
                return {}
        return value_of(_take_from(inbox))

    def prioritize(self, request: str, priority: str) -> dict[str, Any]:
        """Gives an open request of anybody another class, and returns what is known of it.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.
            priority: `interactive`, `normal` or `batch`; its wait so far no longer counts.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do.
        """
        return self._call(prioritize(self._ids.next(), request, priority))

    def pause(self, request: str) -> dict[str, Any]:
        """Makes an open request of anybody wait until it is resumed; returns at once.

        Args:
            request: as for `prioritize`.

        Returns:
            `request`, `number`, `model`, `tokens_sent`, and `stage`: `pausing` until its row has
            left the batch, then `paused`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                paused already or may not be paused.
        """
        return self._call(PauseRequest(id=self._ids.next(), request=check_request(request)))

    def resume(self, request: str) -> dict[str, Any]:
        """Lets a paused request continue; returns at once.

        Args:
            request: as for `prioritize`.

        Returns:
            The same as `pause`; its `stage` is `queued`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                not paused.
        """
        return self._call(ResumeRequest(id=self._ids.next(), request=check_request(request)))

    def reload(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Makes the daemon read its configuration file again; a wrong one changes nothing.

        Args:
            dry_run: change nothing, and return what would change.

        Returns:
            The names of the models that were `added`, `changed` and `removed`, the other `settings`
            that have changed, and in `later` the keys that take effect at the next start. A dry run
            also has in `foreseen` what would happen to each of the models, and in `evicts` and
            `refuses` which would be evicted, and which could not be loaded.

        Raises:
            RequestError: the file is wrong; `detail["problems"]` lists everything that is wrong.
        """
        return self._call(Reload(id=self._ids.next(), dry_run=dry_run))

    def add(
        self, model: str, *, name: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """Makes the daemon serve one more model, from now on and after its next start.

        The model is written into the configuration file; all other lines of it stay. One that is
        configured already keeps its entry. A repository that is not on the daemon's machine is
        downloaded when it is loaded.

        Args:
            model: OWNER/NAME, its address on the hub, an absolute folder, or the name of a model
                that is found on the daemon's machine.
            name: what to call it; None: by a short name.
            revision: of a repository; None: that of the address, or `main`.

        Returns:
            What `reload` returns, with `model`, its name, `files`, its repository or folder, and
            `config_path`: None if the daemon has no file, and forgets the model when it ends.

        Raises:
            RequestError: it is no model, or its name or the file cannot be had; nothing has
                changed. `detail` has `problem`, a word, and `hint`.
        """
        return self._call(add_model(self._ids.next(), model, name=name, revision=revision))

    def remove(self, model: str) -> dict[str, Any]:
        """Takes a model out of the configuration file, and ends it once its requests have finished.

        Args:
            model: its name, not another one that means it.

        Returns:
            As `add` does.

        Raises:
            RequestError: as `add` does.
        """
        return self._call(RemoveModel(id=self._ids.next(), model=check_model(model)))

    def configure(self, changes: Mapping[str, str | None]) -> dict[str, Any]:
        """Sets keys of the configuration file or takes them out, and has the daemon read it again.

        All other lines of the file stay. Either all changes are made, or none.

        Args:
            changes: by the key's whole name, such as `models.NAME.idle_unload_s`,
                `defaults.preload` or `clients.NAME.weight`: the value as text, as
                `mlxsup config set` takes it; None takes the key out.

        Returns:
            What `reload` returns, with `values`, what the file has now by key, and `config_path`.

        Raises:
            RequestError: there is no such key or model, a value is wrong, or the file cannot be
                written; nothing has changed. `detail` has `problem`, a word, and `hint`.
        """
        return self._call(configure(self._ids.next(), changes))

    def settings(self, model: str) -> dict[str, Any]:
        """Returns what the configuration file says about a model.

        Returns:
            `model`, `config_path`, None for a daemon without a file, and `settings`, each with its
            `key`, as `configure` takes it, its `label`, what it `does` and `takes`, its `value`
            and `default` as text, empty if there is none, and `choices` if there are few.

        Raises:
            RequestError: there is no such model, or the file is wrong.
        """
        return self._call(SettingsQuery(id=self._ids.next(), model=check_model(model)))

    def stop(self, *, now: bool = False, timeout_s: float | None = None) -> dict[str, Any]:
        """Asks the daemon to end; returns at once with the pids that will go.

        Args:
            now: whether to cut running requests off.
            timeout_s: how long they may take; None for the configured limit.
        """
        limit_s = check_limit("timeout_s", timeout_s)
        return self._call(Stop(id=self._ids.next(), now=now, timeout_s=limit_s))

    def events(self) -> EventStream:
        """State changes from now on."""
        subscribe = Subscribe(id=self._ids.next())
        inbox = self._post(subscribe, subscribe.id, is_subscription=True)
        return EventStream(subscribe.id, inbox, self._cancel)

    def _call(self, message: Command) -> dict[str, Any]:
        inbox = self._post(message, message.id)
        if (limit_s := answer_limit_s(message)) is None:
            return value_of(_take_from(inbox))
        until = time.monotonic() + limit_s
        while True:
            try:
                return value_of(inbox.get(timeout=SIGNAL_CHECK_S))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise unanswered(message, self._endpoint) from None

    def _post(
        self, message: Message, request_id: RequestId, *, is_subscription: bool = False
    ) -> SyncInbox:
        inbox = SyncInbox()
        frames = encode_command(message)

        def task(connection: Connection) -> None:
            connection.open_command(request_id, frames, inbox, is_subscription=is_subscription)

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
            raise RuntimeError("the client is closed")

    def _cancel(self, request_id: RequestId) -> None:
        # Once the client is closed, everything is cancelled already.
        self._thread.post(lambda connection: connection.cancel(request_id))
