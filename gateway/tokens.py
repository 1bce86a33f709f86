"""The tokens of a prompt, counted, listed and as text; nothing is computed.

A request for them takes the way of any other one: so its model is loaded, and its template and
tokenizer make the prompt as they would for an answer.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .answers import Answer, Stream, read_whole
from .ask import Ask
from .daemon import Daemon
from .names import row_of
from .shape import encode


async def counted(request: Request, ask: Ask, whole: Answer, **more: str) -> Response:
    """Return the number of tokens of a prompt, and more fields if the API has any."""
    (result,), headers = await read_whole(request, ask, whole, _drop)
    return JSONResponse({**more, "input_tokens": result.usage.prompt_tokens}, headers=headers)


async def listed(request: Request, ask: Ask, whole: Answer, daemon: Daemon) -> Response:
    """Return the ids of the tokens of a prompt, in the form of vLLM and llama-server."""
    pieces: list[str] = []

    async def take(_: int, stream: Stream) -> None:
        async for delta in stream:
            if delta.prompt_token_ids:
                pieces.append(encode(delta.prompt_token_ids)[1:-1])
            await asyncio.sleep(0)  # a long prompt has many pieces, which come together

    (result,), headers = await read_whole(request, ask, whole, take)
    row = row_of(await daemon.status(), ask.target or ask.model)
    about = {
        "count": result.usage.prompt_tokens,
        "max_model_len": row and row["context_length"],
        "token_strs": None,
    }
    body = f'{encode(about)[:-1]},"tokens":[{",".join(pieces)}]}}'
    return Response(body, headers=headers, media_type="application/json")


async def shown(request: Request, ask: Ask, whole: Answer) -> Response:
    """Return the text of a prompt: of ids, or of a chat as the template renders it.

    vLLM calls it `prompt`, and llama-server calls that of ids `content`.
    """
    (result,), headers = await read_whole(request, ask, whole, _drop)
    text = {"prompt": result.prompt, "content": result.prompt}
    return Response(encode(text), headers=headers, media_type="application/json")


async def _drop(_: int, stream: Stream) -> None:
    async for _delta in stream:
        pass
