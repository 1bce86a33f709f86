"""`GET /models/sse`: the changes of all models, in the form of llama.cpp's router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answers import OpenAnswers, gone
from .body import Receive
from .changes import Changes, Follower
from .failure import Failure
from .openai.errors import body_of, interrupted
from .openai.models import status_of
from .sse import EventStream, Send, comment, event


def event_of(change: Mapping[str, Any]) -> dict[str, Any]:
    """A change of a model as this API has it.

    Args:
        change: as `Client.events` yields it.
    """
    data: dict[str, Any] = {"status": (status := status_of(change["to"]))["value"]}
    progress = change["progress"]
    if progress is not None:
        data["progress"] = {"current": progress["phase"], "value": progress["fraction"]}
    if "failed" in status:
        data |= {"failed": True, "message": change["note"]}
    return {"model": change["model"], "event": "model_status", "data": data}


class ModelEvents:
    """Lets anybody follow the models.

    Args:
        changes: of all models.
        open_answers: where followers are listed, so that they end before the gateway does.
    """

    def __init__(self, changes: Changes, open_answers: OpenAnswers) -> None:
        self._changes = changes
        self._open_answers = open_answers

    def routes(self) -> list[Route]:
        """`GET /models/sse`."""
        return [Route("/models/sse", self.follow, methods=["GET"])]

    async def follow(self, request: Request) -> Response:
        """From now on, until one side leaves.

        Raises:
            Failure: too many do.
        """
        return _Followed(self._changes.follow(), self._open_answers)


class _Followed(Response):
    """A response that never ends by itself."""

    def __init__(self, follower: Follower, open_answers: OpenAnswers) -> None:
        super().__init__()
        self._follower = follower
        self._open_answers = open_answers

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Sends the response; see Starlette's `Response`."""
        out = EventStream(scope, send, {})
        passing_on = asyncio.create_task(_pass_on(self._follower, out))
        has_left = asyncio.create_task(gone(receive))
        self._open_answers.add([passing_on])
        with self._follower:
            try:
                await asyncio.wait({passing_on, has_left}, return_when=asyncio.FIRST_COMPLETED)
                if has_left.done():
                    return
                failure = _failure_in(passing_on)
                # And no end: who follows sees that it has been cut off, and connects again.
                await out.write(event(json.dumps(body_of(failure)).encode()))
            finally:
                self._open_answers.remove([passing_on])
                for task in (passing_on, has_left):
                    task.cancel()
                await asyncio.gather(passing_on, has_left, return_exceptions=True)


async def _pass_on(follower: Follower, out: EventStream) -> None:
    await out.write(comment("changes from now on"))
    async for change in follower:
        await out.write(event(json.dumps(event_of(change), ensure_ascii=False).encode()))


def _failure_in(task: asyncio.Task[None]) -> Failure:
    """Why it has ended: the daemon is gone, the reader was too slow, or the gateway is ending."""
    try:
        task.result()
    except Failure as failure:
        return failure
    except asyncio.CancelledError:
        pass
    return interrupted()
