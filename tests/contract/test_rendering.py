"""Who joins an answer is shown, at every token, what had been shown by then, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.states import Channel
from mlxsup.protocol.worker_messages import RowDelta

from support.worker.loop_driver import LoopDriver

LENGTH = 24
PROMPT = "Once upon a time there was a fox 🦊 who"
ONE_OF_EACH_ENGINE = ["fake", pytest.param("together", marks=pytest.mark.mlx)]


def shown(deltas: list[RowDelta]) -> dict[Channel, str]:
    """The text of each channel."""
    texts: dict[Channel, str] = {}
    for delta in deltas:
        if delta.text:
            texts[delta.channel] = texts.get(delta.channel, "") + delta.text
    return texts


@pytest.mark.parametrize("make", ONE_OF_EACH_ENGINE, indirect=True, scope="module")
@pytest.mark.parametrize("has_stop", [False, True])
def test_rendering_equals_the_stream_at_every_token(worker: LoopDriver, has_stop: bool) -> None:
    parameters: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "seed": 3}
    if has_stop:  # one that only begins to match, so that text is held back
        parameters["stop"] = [worker.answer(**parameters).text[3:6] + "\0"]
    whole = worker.answer(**parameters)
    assert len(whole.tokens) == LENGTH
    for tokens in range(1, LENGTH):
        bodies = worker.render(whole.resume_after(tokens))
        rendered: dict[Channel, str] = {}
        for body in bodies:
            if body.text:
                rendered[body.channel] = rendered.get(body.channel, "") + body.text
        assert rendered == shown(whole.until(tokens)), tokens
