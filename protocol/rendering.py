"""How a client that joins a stream gets what was delivered before: the worker renders it again.

The supervisor keeps the ids of the tokens, and not their text.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .message import Message, record


@record
class Render(Message):
    """Supervisor → worker: show once more what was delivered of an answer.

    Attributes:
        number: the supervisor's name for this question.
        opening, parameters, seed, fingerprint: of the answer's `Acceptance`.
        delivered: ids of the tokens that its client was sent, packed as `ids.pack_tokens` does; at
            least one.
    """

    TYPE: ClassVar[str] = "render"
    number: int
    opening: str
    parameters: dict[str, Any]
    seed: int
    fingerprint: str
    delivered: bytes


@record
class Rendered(Message):
    """Worker → supervisor: the answer to `Render`.

    Attributes:
        number: of the question.
        bodies: what a client is shown, packed by `delta_body.pack_body`, at least one; empty if
            this worker cannot say, because it is of another model than the one that answers.
    """

    TYPE: ClassVar[str] = "rendered"
    number: int
    bodies: list[bytes]
