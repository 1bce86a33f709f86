"""Shows once more what was delivered of answers, for people who join their streams.

It runs on the owner thread, because some tokenizers must not be used by two threads at once, and in
pieces: each turn of the loop renders a bounded number of tokens, which costs less than a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.delta import DeltaBody, pack_body
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import Channel
from mlxsup.protocol.text import log_line
from mlxsup.protocol.worker_messages import Render, Rendered

from .answer import AnswerText
from .engine import Engine, EngineFacts, TextCodec
from .text.channels import Piece
from .text.tool_calls import ToolCallReader

TOKENS_PER_TURN = 256

logger = logging.getLogger(__name__)


class _Job:
    """One answer that is being rendered."""

    def __init__(self, asked: Render, codec: TextCodec) -> None:
        body = RequestBody.accepted([0], asked.parameters, asked.seed)
        self.number = asked.number
        self._tokens = deque(unpack_tokens(asked.delivered))
        self._answer = AnswerText(
            codec,
            body.stop or (),
            asked.opening,
            ToolCallReader(body.callable_tools, asked.seed),
            form=body.form,
            min_tokens=body.min_tokens or 0,
            after=unpack_tokens(asked.before)[-1] if body.echo and asked.before else None,
        )
        self._shown: list[tuple[Channel, list[str]]] = []

    def advance(self, tokens: int) -> bool:
        """Renders that many more tokens; returns whether that was all."""
        for _ in range(min(tokens, len(self._tokens))):
            for piece in self._answer.add(self._tokens.popleft()):
                self._show(piece)
        return not self._tokens

    def bodies(self) -> list[bytes]:
        """Return one body for each run of text in one channel, and for each tool call."""
        shown = self._shown or [(Channel.CONTENT, [])]
        return [
            pack_body(DeltaBody(text="".join(texts), channel=channel)) for channel, texts in shown
        ]

    def _show(self, piece: Piece) -> None:
        if not piece.text:
            return
        is_call = piece.channel is Channel.TOOL_CALL
        if self._shown and self._shown[-1][0] is piece.channel and not is_call:
            self._shown[-1][1].append(piece.text)
        else:
            self._shown.append((piece.channel, [piece.text]))


class Rendering:
    """The answers that are being rendered, in the order of asking.

    Args:
        engine: has the text side of the model.
        facts: of the engine.
        send: sends a message to the supervisor.
    """

    def __init__(
        self, engine: Engine, facts: EngineFacts, send: Callable[[Rendered], None]
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._send = send
        # Bounded by the supervisor: few may join each of the requests that are open.
        self._jobs: deque[_Job] = deque()

    @property
    def is_busy(self) -> bool:
        """True if there is anything left to render."""
        return bool(self._jobs)

    def begin(self, asked: Render) -> None:
        """Takes one more; an answer of another engine could come out different."""
        try:
            if asked.fingerprint in (self._facts.fingerprint, *self._facts.adapters.values()):
                self._jobs.append(_Job(asked, self._engine.text))
                return
        except RemoteError as error:  # another version of mlxsup had accepted the request
            logger.info(log_line("answer not rendered", number=asked.number, code=error.code))
        self._send(Rendered(number=asked.number, bodies=[]))

    def advance(self) -> None:
        """Renders a piece of the first, and sends it once it is complete."""
        if self._jobs and self._jobs[0].advance(TOKENS_PER_TURN):
            job = self._jobs.popleft()
            self._send(Rendered(number=job.number, bodies=job.bodies()))
