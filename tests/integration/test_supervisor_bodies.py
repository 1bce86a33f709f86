"""Bodies on their way through a daemon: what a broken worker packs hurts its own streams alone."""

from __future__ import annotations

import pytest

from mlxsup.client import AsyncClient, RequestError
from mlxsup.client.async_streams import AsyncStream
from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.packed_rows import PackedRow
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import CancelRow, RowDelta, Step

from support.played_daemon import Stage, play, token


async def text_of(stream: AsyncStream) -> str:
    return "".join([delta.text async for delta in stream])


@pytest.mark.parametrize("body", [b"\xc1", b"\x80\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 9000])
def test_a_body_that_is_none_ends_its_stream_while_others_continue(body: bytes) -> None:
    async def script(stage: Stage) -> None:
        worker = await stage.ready()
        async with AsyncClient(stage.endpoint) as client:
            hurt = client.generate("a", prompt="x", max_tokens=4)
            first = await worker.accept()
            fine = client.generate("a", prompt="y", max_tokens=4)
            second = await worker.accept()
            bad = PackedRow(key=first, tokens=pack_tokens([7]), body=body)
            await worker.say(Step(step=1, rows=[token(second, 1), bad]))
            with pytest.raises(RequestError) as caught:
                await text_of(hurt)
            assert caught.value.code == "internal"
            assert "piece 0 of the stream cannot be read" in caught.value.message
            assert await worker.hear(CancelRow) == CancelRow(key=first)
            ended = RowDelta(key=first, finish=FinishReason.CANCELLED)
            last = PackedRow(
                key=second,
                tokens=pack_tokens([2]),
                body=pack_body("2 ", Channel.CONTENT),
                finish=FinishReason.STOP,
            )
            await worker.say(Step(step=2, rows=[ended, last], between_steps=1))
            assert await text_of(fine) == "1 2 "
            status = await client.status()
            assert [row["state"] for row in status["models"]] == ["READY"]

    play(script)
