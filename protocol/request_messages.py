"""Messages of clients about open requests, whoever sent those.

Each names a request by its id or, as `#12`, by the number that `requests` and `status` show for it.
"""

from __future__ import annotations

from typing import ClassVar

from .ids import RequestId
from .message import Message, record
from .version import PROTOCOL_VERSION


@record
class RequestsQuery(Message):
    """Client → supervisor: answer with `Reply`: every open request, and how far it is.

    Attributes:
        id: of this command.
        client: only the requests of this account, or of the process or terminal with this number;
            None for all.
    """

    TYPE: ClassVar[str] = "requests"
    id: RequestId
    client: str | None = None
    v: int = PROTOCOL_VERSION


@record
class CancelRequest(Message):
    """Client → supervisor: end an open request of any connection; answered at once.

    Attributes:
        id: of this command.
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "cancel_request"
    id: RequestId
    request: RequestId
    v: int = PROTOCOL_VERSION


@record
class Attach(Message):
    """Client → supervisor: send me the stream of an open request of any connection, from its first
    token; under this id come `Deltas` and an end as for a request of one's own. A `Cancel` of this
    id only ends the listening.

    Attributes:
        id: under which it comes.
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "attach"
    id: RequestId
    request: RequestId
    v: int = PROTOCOL_VERSION


@record
class PauseRequest(Message):
    """Client → supervisor: take this request out of its batch, or out of the line, and let it wait
    until somebody resumes it; answered at once.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "pause"
    id: RequestId
    request: RequestId
    v: int = PROTOCOL_VERSION


@record
class ResumeRequest(Message):
    """Client → supervisor: let a paused request continue; answered at once.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "resume"
    id: RequestId
    request: RequestId
    v: int = PROTOCOL_VERSION
