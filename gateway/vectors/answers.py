"""Has the daemon embed or rank texts, and shows what comes of it.

Every vector becomes text in the turn of the event loop that brings it: 2,048 vectors of 1,024
numbers at the end would take the loop for a second.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxsup.client import RequestError, Result
from mlxsup.client.vectors import ranked
from mlxsup.protocol.pooling import unpack_vector

from ..answers import Answer, OpenAnswers, Stream, ignored
from ..converter import Sent
from ..errors import failure_of
from ..headers import REQUEST_ID
from ..shape import encode
from .requests import Form, VectorAsk


async def answer_vectors(
    request: Request, open_answers: OpenAnswers, ask: VectorAsk, sent: Sequence[Sent]
) -> Response:
    """Return the response to a request whose body was read.

    Raises:
        Failure: the daemon has refused.
        Disconnected: the client has left.
    """
    asked = Answer(open_answers, ask, sent)
    shown: dict[int, str] = {}
    show = _SHOWN.get(ask.form)

    async def take(_: int, stream: Stream) -> None:
        async for delta in stream:
            if show is not None and delta.vector is not None:
                shown[delta.token_ids[0]] = show(delta.vector)
                await asyncio.sleep(0)  # others get their turn between two vectors

    began = time.monotonic()
    [result] = await asked.read(take, request.receive)
    try:
        # The scores of a ranking are one number each.
        found = ranked(result, ask.top_n) if ask.form == Form.RANKING else []
    except RequestError as error:
        raise failure_of(error) from None
    results = [{"index": one.index, "relevance_score": one.score} for one in found]
    vectors = [shown[number] for number in sorted(shown)]
    body = _body(ask, asked.request_id, result, results, vectors, time.monotonic() - began)
    headers = {REQUEST_ID: asked.request_id, **ignored(ask)}
    return Response(body, headers=headers, media_type="application/json")


def _floats(packed: bytes) -> str:
    """Return a vector as a list in JSON: nine digits tell all 32-bit floats apart."""
    return f"[{','.join([f'{number:.9g}' for number in unpack_vector(packed)])}]"


def _base64(packed: bytes) -> str:
    return f'"{base64.b64encode(packed).decode()}"'


_SHOWN: Mapping[str, Callable[[bytes], str]] = {
    Form.FLOAT: _floats,
    Form.BASE64: _base64,
    Form.OLLAMA: _floats,
    Form.OLLAMA_ONE: _floats,
}


def _body(
    ask: VectorAsk,
    request_id: str,
    result: Result,
    results: list[dict[str, Any]],
    vectors: Sequence[str],
    took_s: float,
) -> str:
    """Return the whole answer as JSON."""
    tokens = result.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    match ask.form:
        case Form.RANKING:
            answer = {"id": request_id, "model": ask.model, "results": results, "usage": usage}
            return encode(answer)
        case Form.OLLAMA:
            head = {"model": ask.model, "total_duration": int(took_s * 1e9), "load_duration": 0}
            head["prompt_eval_count"] = tokens
            return f'{encode(head)[:-1]},"embeddings":[{",".join(vectors)}]}}'
        case Form.OLLAMA_ONE:
            return f'{{"embedding":{vectors[0]}}}'
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{vector}}}'
        for index, vector in enumerate(vectors)
    )
    head = {"object": "list", "model": ask.model, "usage": usage}
    return f'{encode(head)[:-1]},"data":[{data}]}}'
