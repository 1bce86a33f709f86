"""What both clients can do to see: open requests, whoever sent them, and how much is logged."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mlxsup.protocol.log_level import ChangeLogLevel
from mlxsup.protocol.request_messages import Attach, CancelRequest, RequestsQuery

from .api import ClientBase, StreamType
from .parameters import Command, check_client, check_level, check_request, encode_command


class RequestStreams(ClientBase[StreamType]):
    """Streams of requests that others have sent."""

    def attach(self, request: str) -> StreamType:
        """Joins the stream of an open request of anybody, from its first token; returns at once.

        Ending this stream, as `cancel` does, does not end the request. Notices are for those who
        sent it, and so are the log-probabilities of tokens that had come before.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.

        Raises:
            RequestError: out of the stream, `invalid_request`: no open request has that id, or
                several do, or too many have joined it, or its model is not READY and some of the
                answer has come before; `worker_crashed`: the worker could not show that in time.
        """
        id = self._ids.next()
        frames = encode_command(Attach(id=id, request=check_request(request)))
        return self._open_stream(id, frames, None)


class RequestCommands(RequestStreams[StreamType]):
    """The part of `Client` that is about what one can see."""

    def requests(self, *, client: str | None = None) -> dict[str, Any]:
        """Every open request, and how far it is.

        Args:
            client: only those of this account, or of the process or terminal with this number.

        Returns:
            `requests`, a list of maps (`id`, `number`, `model`, `client`, `state`, `place`,
            `prefill`, `expected_s`, `tokens_sent`, `tokens_per_s`, `engine_s` and others; see
            docs/protocol.md), and `more`: how many there are besides.
        """
        return self._call(RequestsQuery(id=self._ids.next(), client=check_client(client)))

    def cancel(self, request: str) -> dict[str, Any]:
        """Ends an open request of anybody; its stream ends normally, as `cancelled`.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.

        Returns:
            `request`, `number`, `model` and `tokens_sent`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do.
        """
        return self._call(CancelRequest(id=self._ids.next(), request=check_request(request)))

    def log_level(self, level: str) -> dict[str, Any]:
        """Makes the daemon and its workers log from this level on, until the daemon ends.

        Args:
            level: `debug`, `info`, `warning` or `error`.

        Raises:
            RequestError: `invalid_request`: there is no such level.
        """
        return self._call(ChangeLogLevel(id=self._ids.next(), level=check_level(level)))

    @abstractmethod
    def _call(self, message: Command) -> dict[str, Any]:
        """Sends a command and returns what it is answered with."""


class AsyncRequestCommands(RequestStreams[StreamType]):
    """The part of `AsyncClient` that is about what one can see."""

    async def requests(self, *, client: str | None = None) -> dict[str, Any]:
        """As `Client.requests`."""
        return await self._call(RequestsQuery(id=self._ids.next(), client=check_client(client)))

    async def cancel(self, request: str) -> dict[str, Any]:
        """As `Client.cancel`."""
        return await self._call(CancelRequest(id=self._ids.next(), request=check_request(request)))

    async def log_level(self, level: str) -> dict[str, Any]:
        """As `Client.log_level`."""
        return await self._call(ChangeLogLevel(id=self._ids.next(), level=check_level(level)))

    @abstractmethod
    async def _call(self, message: Command) -> dict[str, Any]:
        """Sends a command and returns what it is answered with."""
