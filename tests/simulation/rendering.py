"""How a played worker shows once more what was delivered: from the tokens alone, a little later."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.states import Channel

from .answers import HOLDS_BACK, REASONING_TOKENS
from .links import Timeline

if TYPE_CHECKING:
    from .worker import PlayedWorker

TAKES_S = (0.0, 0.05, 0.5)
NOTHING_SHARE = 0.05
"""Of questions that the worker cannot answer, as if it were of another model by now."""


class Renderer:
    """The helper threads of all workers.

    Args:
        seed: of the run.
        time: when things happen.
    """

    def __init__(self, seed: int, time: Timeline) -> None:
        self._dice = random.Random(f"renders in {seed}")
        self._time = time

    def answers(self, worker: PlayedWorker, question: Render) -> None:
        """A worker will answer, if it still does anything then."""
        has_nothing = self._dice.random() < NOTHING_SHARE
        bodies = [] if has_nothing else _bodies(question)

        def say() -> None:
            if not (worker.is_hung or worker.is_frozen):
                worker.say(Rendered(number=question.number, bodies=bodies))

        self._time.after(self._dice.choice(TAKES_S), say)


def _bodies(question: Render) -> list[bytes]:
    """What its client was shown: a body for each part of the answer."""
    tokens = unpack_tokens(question.delivered)
    reasoning = REASONING_TOKENS if question.opening else 0
    is_held_back = tokens[-1] % HOLDS_BACK == 0
    texts = [f"<{token}>" for token in tokens[: len(tokens) - is_held_back]]
    parts = {Channel.REASONING: texts[:reasoning], Channel.CONTENT: texts[reasoning:]}
    bodies = [pack_body("".join(part), channel) for channel, part in parts.items() if part]
    return bodies or [pack_body("", Channel.CONTENT)]
