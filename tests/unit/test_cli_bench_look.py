"""What `mlxsup bench` sees of others, from a daemon that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mlxsup.cli.benchmark.measuring import look
from mlxsup.cli.benchmark.run import Look, Run
from mlxsup.cli.benchmark.sizes import Cell
from mlxsup.cli.exit_status import CliError
from mlxsup.client import AsyncClient


class Daemon:
    """One whose answer is over already when it lists what is open.

    Args:
        more: open requests that it does not list.
        ended: the number of that answer, if the recorder still has it.
    """

    request_id = "mine"

    def __init__(self, more: int, ended: int | None) -> None:
        self.more = more
        self.ended = ended

    def generate(self, model: str, **parameters: Any) -> Daemon:
        return self

    def cancel(self) -> None:
        """Nothing is left of it."""

    async def requests(self) -> dict[str, Any]:
        return {"requests": [], "more": self.more}

    async def status(self, *, debug: bool) -> dict[str, Any]:
        assert debug
        others = [{"kind": "request_started", "id": "mine"}, {"kind": "model_changed"}]
        own = {"kind": "request_ended", "id": "mine", "number": self.ended}
        row = {"name": "m", "steps": 8, "generation": 1}
        return {"flight": [*others, own][: 3 if self.ended else 2], "models": [row]}

    def __aiter__(self) -> Daemon:
        return self

    async def __anext__(self) -> None:
        raise StopAsyncIteration


def seen(daemon: Daemon) -> Look:
    """What is seen of the others."""
    cell = Cell(prompt_tokens=16, output_tokens=32, concurrency=1)
    run = Run(model="m", cells=[cell], repeats=2)
    return asyncio.run(look(cast(AsyncClient, daemon), run))


@pytest.mark.parametrize("more", [0, 300])
def test_a_model_that_has_answered_before_the_look_is_found_in_the_recorder(more: int) -> None:
    assert seen(Daemon(more, 12)) == Look(number=12, open_others=more, steps={"m": 8}, generation=1)


def test_a_request_that_is_nowhere_is_behind_too_many_others() -> None:
    with pytest.raises(CliError) as caught:
        seen(Daemon(300, None))
    assert caught.value.code == "busy"
    assert "300 requests are open" in caught.value.message
