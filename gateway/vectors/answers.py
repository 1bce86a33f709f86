"""The shapes of answers with vectors and rankings.

Every vector becomes text in the turn of the event loop that brings it: 2,048 vectors of 1,024
numbers at the end would take the loop for a second.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from mlxsup.client import Delta, RequestError, Result
from mlxsup.client.vectors import ranked
from mlxsup.protocol.pooling import unpack_vector

from ..errors import failure_of
from ..shape import WholeShape, encode
from .requests import Form, VectorAsk


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


class VectorShape(WholeShape):
    """The answer to one request for embeddings or a ranking."""

    IS_LONG: ClassVar[bool] = True

    def __init__(self, ask: VectorAsk, name: str, created: int) -> None:
        self._ask = ask
        self._name = name
        self._show = _SHOWN.get(ask.form)
        self._shown: dict[int, str] = {}

    def take(self, index: int, delta: Delta) -> None:
        """Encode a vector."""
        if self._show is not None and delta.vector is not None:
            self._shown[delta.token_ids[0]] = self._show(delta.vector)

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON.

        Raises:
            Failure: it is not what was asked for.
        """
        (result,) = results
        return self._whole(result).encode()

    def _whole(self, result: Result) -> str:
        tokens = result.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = self._ask.model
        vectors = [self._shown[number] for number in sorted(self._shown)]
        match self._ask.form:
            case Form.RANKING:
                ranking = self._ranking(result)
                answer = {"id": self._name, "model": model, "results": ranking, "usage": usage}
                return encode(answer)
            case Form.OLLAMA:
                took_ns = int(result.timings.total_s * 1e9)
                head = {"model": model, "total_duration": took_ns, "load_duration": 0}
                head["prompt_eval_count"] = tokens
                return f'{encode(head)[:-1]},"embeddings":[{",".join(vectors)}]}}'
            case Form.OLLAMA_ONE:
                return f'{{"embedding":{vectors[0]}}}'
        data = ",".join(
            f'{{"object":"embedding","index":{index},"embedding":{vector}}}'
            for index, vector in enumerate(vectors)
        )
        head = {"object": "list", "model": model, "usage": usage}
        return f'{encode(head)[:-1]},"data":[{data}]}}'

    def _ranking(self, result: Result) -> list[dict[str, Any]]:
        """Return the best documents first; the score of each is one number."""
        try:
            found = ranked(result, self._ask.top_n)
        except RequestError as error:
            raise failure_of(error) from None
        return [{"index": one.index, "relevance_score": one.score} for one in found]
