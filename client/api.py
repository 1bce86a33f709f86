"""`generate`, as both clients offer it: sent when called, and never awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from mlxsup.protocol.ids import RequestId

from .connection import RequestIds
from .endpoint import find_endpoint
from .parameters import encode_generate
from .streams import OnNotice

StreamType = TypeVar("StreamType")


class ClientBase(ABC, Generic[StreamType]):
    """A client of one daemon.

    Args:
        endpoint: `ipc://…`; where absent, that of MLXSUP_ENDPOINT or of the default runtime folder.

    Raises:
        ValueError: the endpoint is not one.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = find_endpoint(endpoint)
        self._ids = RequestIds()

    @property
    def endpoint(self) -> str:
        """Where the daemon is looked for."""
        return self._endpoint

    def generate(
        self,
        model: str,
        *,
        prompt: str | None = None,
        prompt_tokens: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: list[str] | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        first_token_timeout_s: float | None = None,
        client: str | None = None,
        resume: bool = True,
        on_notice: OnNotice | None = None,
    ) -> StreamType:
        """Sends a request and returns its stream of `Delta`.

        Args:
            model: who shall answer.
            prompt: text that is tokenised as it stands; exactly one of the three inputs is given.
            prompt_tokens: token ids, taken as they are.
            messages: a chat, rendered with the model's template.
            max_tokens: tokens to generate at most; None for what still fits into the context.
            temperature: 0 picks the likeliest token; larger spreads further.
            top_p: sample from the smallest set of tokens whose probabilities reach this sum.
            stop: texts that end the answer; they are not part of it.
            seed: makes sampling repeatable.
            timeout_s: until the last token; None or 0 for no limit.
            queue_timeout_s: how long it may wait for its turn; None for the configured limit.
            first_token_timeout_s: until the first token; None for the configured limit.
            client: on whose behalf, for fairness; None for this client.
            resume: whether the answer goes on after a crash; without, it ends with
                `worker_crashed`.
            on_notice: told with a `Notice` what the request waits for, each time that changes, by
                whoever reads the stream.

        Raises:
            RequestError: `invalid_request`; every other error comes out of the stream.
        """
        body = {
            "prompt": prompt,
            "prompt_tokens": prompt_tokens,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop": stop,
            "seed": seed,
        }
        request_id = self._ids.next()
        frames = encode_generate(
            request_id,
            model,
            body,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            first_token_timeout_s=first_token_timeout_s,
            client=client,
            resume=resume,
            notices=on_notice is not None,
        )
        return self._open_stream(request_id, frames, on_notice)

    @abstractmethod
    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> StreamType:
        """Sends the frames and returns the stream of their answer."""
