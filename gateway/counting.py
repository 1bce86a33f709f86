"""Counts the tokens of a prompt without computing it.

The count is a request for more tokens than any context has: its refusal names the length of the
prompt, so the same template and tokenizer count it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxsup.client import AsyncClient, ErrorCode, RequestError
from mlxsup.client.async_streams import AsyncStream

from .answers import Answer, OpenAnswers, ignored
from .ask import Ask
from .converter import Sent
from .failure import Failure
from .headers import REQUEST_ID
from .metrics import Meter

UNCOUNTED = Meter()
"""Nobody reads it: the refusal that such a request ends with is no error."""


async def count_tokens(
    request: Request,
    client: AsyncClient,
    ask: Ask,
    sent: Sequence[Sent],
    open_answers: OpenAnswers,
    **more: str,
) -> Response:
    """Return the number of tokens of a prompt, and more fields if the API has any.

    The request asks for more tokens than any context has room for. The worker renders and
    tokenises the prompt, and refuses it with its length, before it gets a row.

    Raises:
        Failure: the daemon has refused it for another reason.
        Disconnected: nobody waits for the answer any longer.
    """
    asked = Answer(client, ask, sent, open_answers, None, UNCOUNTED)
    lengths: list[int] = []

    async def take(_: int, stream: AsyncStream) -> None:
        try:
            async for _delta in stream:
                pass
        except RequestError as error:
            length = error.detail.get("prompt_tokens")
            if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and isinstance(length, int):
                lengths.append(length)
            raise

    try:
        await asked.read(take, request.receive)
    except Failure:
        if not lengths:
            raise
    headers = {REQUEST_ID: asked.request_id, **ignored(ask)}
    return JSONResponse({**more, "input_tokens": lengths[0]}, headers=headers)
