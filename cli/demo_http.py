"""What `mlxsup demo` shows of HTTP: an answer that a killed worker delays, and nothing else."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlxsup.protocol.gateway import EXTRA_MODULES, LOCAL_HOST, Address

from .exit_status import CliError

if TYPE_CHECKING:
    from http.client import HTTPResponse

ANY_PORT = Address(host=LOCAL_HOST, port=0)
PATH = "/v1/chat/completions"
DATA = b"data: "
END = b"[DONE]"

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 600.0


def has_extra() -> bool:
    """Whether a gateway could run here."""
    return all(find_spec(name) is not None for name in EXTRA_MODULES)


class HttpDoor:
    """Where the demonstration's gateway listens, once it does."""

    def __init__(self) -> None:
        self._urls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def heard(self, change: Mapping[str, Any]) -> None:
        """Something has changed in the daemon."""
        if url := change.get("gateway"):
            self._urls.put(url)

    def url(self) -> str:
        """Waits for it.

        Raises:
            CliError: it does not begin to listen.
        """
        try:
            return self._urls.get(timeout=START_LIMIT_S)
        except queue.Empty:
            message = f"the gateway did not listen within {START_LIMIT_S:g} s"
            raise CliError(message, code="gateway", hint="please report it") from None


def ask(url: str, body: Mapping[str, Any], on_piece: Callable[[int], None]) -> str:
    """The text of a streamed chat.

    Args:
        url: of the gateway.
        body: of the request, besides `stream`.
        on_piece: called with the number of pieces of text so far.

    Raises:
        CliError: it was refused, or has broken off.
    """
    pieces: list[str] = []
    for piece in _pieces(url, json.dumps({**body, "stream": True})):
        pieces.append(piece)
        on_piece(len(pieces))
    return "".join(pieces)


def _pieces(url: str, body: str) -> Iterator[str]:
    """The pieces of text of an answer.

    Raises:
        CliError: as `ask`.
    """
    import http.client  # which the help of `demo` need not wait for

    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield from _texts(response)
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"the answer over HTTP has broken off: {error}", code="gateway") from None
    finally:
        connection.close()


def _texts(response: HTTPResponse) -> Iterator[str]:
    if response.status != HTTPStatus.OK:
        raise CliError(json.loads(response.read())["error"]["message"], code="gateway")
    for line in response:
        data = line.removeprefix(DATA).strip()
        if data == END:
            return
        if not line.startswith(DATA):
            continue
        event = json.loads(data)
        if "error" in event:
            raise CliError(event["error"]["message"], code=event["error"]["code"])
        for choice in event["choices"]:
            delta = choice["delta"]
            if text := delta.get("content") or delta.get("reasoning_content"):
                yield text
    raise CliError("the answer over HTTP has broken off", code="gateway")
