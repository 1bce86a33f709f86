"""The tokens of a prompt, counted, listed and as text; nothing is computed.

A request for them takes the way of any other one: so its model is loaded, and its template and
tokenizer make the prompt as they would for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mlxsup.client import Delta, Result

from .ask import Ask
from .shape import WholeShape, encode


class CountShape(WholeShape):
    """The number of tokens of a prompt.

    Args:
        ask: what was asked for.
        name: of the request.
        created: seconds since the epoch.
        more: further fields of the answer, if the API has any.
    """

    def __init__(self, ask: Ask, name: str, created: int, **more: str) -> None:
        self._more = more

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""
        (result,) = results
        return encode({**self._more, "input_tokens": result.usage.prompt_tokens}).encode()


class TokensShape(WholeShape):
    """The ids of the tokens of a prompt, in the form of vLLM and llama-server.

    Attributes:
        context_length: of the model, which is known once it is loaded.
    """

    IS_LONG: ClassVar[bool] = True

    def __init__(self) -> None:
        self.context_length: int | None = None
        self._pieces: list[str] = []

    def take(self, index: int, delta: Delta) -> None:
        """Encode the ids of a piece."""
        if delta.prompt_token_ids:
            self._pieces.append(encode(delta.prompt_token_ids)[1:-1])

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""
        (result,) = results
        about: dict[str, Any] = {
            "count": result.usage.prompt_tokens,
            "max_model_len": self.context_length,
            "token_strs": None,
        }
        return f'{encode(about)[:-1]},"tokens":[{",".join(self._pieces)}]}}'.encode()


class PromptShape(WholeShape):
    """The text of a prompt: of ids, or of a chat as the template renders it.

    vLLM calls it `prompt`, and llama-server calls that of ids `content`.
    """

    def __init__(self, ask: Ask, name: str, created: int) -> None:
        pass

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""
        (result,) = results
        return encode({"prompt": result.prompt, "content": result.prompt}).encode()
