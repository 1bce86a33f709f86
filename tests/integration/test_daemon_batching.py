"""What concurrent streams get: whole, in order, at once; counted in steps, not in seconds."""

from __future__ import annotations

import pytest
from support.daemon import Daemon, fake, row
from support.streams import Reader


@pytest.mark.parametrize("concurrency", [1, 4, 8, 16])
def test_every_chunk_exactly_once_in_order_J2(concurrency: int) -> None:
    model = fake(max_concurrency=16, fake={"step_s": 0.001})
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        alone = {
            n: client.complete("m", prompt=f"prompt {n}", max_tokens=64).token_ids
            for n in range(concurrency)
        }
        readers = [Reader(client, "m", f"prompt {n}", max_tokens=64) for n in range(concurrency)]
        for number, reader in enumerate(readers):
            result = reader.finished()
            assert (result.finish_reason, result.usage.completion_tokens) == ("length", 64)
            assert result.token_ids == reader.tokens == alone[number]
            assert result.text == reader.text


def test_requests_share_steps_instead_of_waiting_for_the_batch_to_empty_C1_C2() -> None:
    model = fake(max_concurrency=4, fake={"step_s": 0.02})
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        first = Reader(client, "m", "long", max_tokens=100).started()
        second = client.complete("m", prompt="short", max_tokens=10)
        assert second.finish_reason == "length"
        assert first.is_alive(), "the short one did not wait for the long one"
        first.finished()
        steps = row(client, "m")["steps"]
        assert steps <= 100 + 10, "both ran in the same steps"


def test_no_step_is_made_when_nothing_runs_C5() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=5)
        before = row(client, "m")["steps"]
        for _ in range(20):
            client.ping()
        assert row(client, "m")["steps"] == before


def test_eight_tokens_twice_at_once_J3() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        readers = [Reader(client, "m", f"hello {n}", max_tokens=8) for n in range(2)]
        assert [len(reader.finished(10.0).token_ids) for reader in readers] == [8, 8]
