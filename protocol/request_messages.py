"""Messages of clients about open requests of all clients.

Each names a request by its id or, as `#12`, by the number that `requests` and `status` show for it.
"""

from __future__ import annotations

from typing import ClassVar

from .ids import RequestId
from .message import Command, record


@record
class RequestsQuery(Command):
    """Client → supervisor: answer with `Reply`: every open request, and how far it is.

    Attributes:
        client: only the requests of this account, or of the process or terminal with this number;
            None for all.
    """

    TYPE: ClassVar[str] = "requests"
    client: str | None = None


@record
class CancelRequest(Command):
    """Client → supervisor: end an open request of any connection; answered at once.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "cancel_request"
    request: RequestId


@record
class Attach(Command):
    """Client → supervisor: send me the stream of an open request of any connection, from its first
    token; under this id come `Deltas` and an end as for a request of one's own. A `Cancel` of this
    id only ends the listening.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "attach"
    request: RequestId


@record
class PauseRequest(Command):
    """Client → supervisor: take this request out of its batch, or out of the line, and let it wait
    until it is resumed; answered at once.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "pause"
    request: RequestId


@record
class ResumeRequest(Command):
    """Client → supervisor: let a paused request continue; answered at once.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    TYPE: ClassVar[str] = "resume"
    request: RequestId
