"""What concurrent streams get: whole, in order, at once; counted in steps, not in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.daemon import Daemon, fake, row
from support.streams import Reader
from support.tiny_model import make_tiny_model

LONG_PROMPT_TOKENS = 40_000


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
        first = Reader(client, "m", "long", max_tokens=4000).started()
        second = client.complete("m", prompt="short", max_tokens=10)
        assert second.finish_reason == "length"
        assert first.is_alive(), "the short one did not wait for the long one"
        steps = row(client, "m")["steps"]
        first.stream.cancel()
        assert steps <= len(first.finished().token_ids), "both ran in the same steps"


def test_no_step_is_made_when_nothing_runs_C5() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=5)
        before = row(client, "m")["steps"]
        for _ in range(20):
            client.ping()
        assert row(client, "m")["steps"] == before


def test_eight_tokens_twice_at_once_J3() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        client.load("m")
        readers = [Reader(client, "m", f"hello {n}", max_tokens=8) for n in range(2)]
        assert [len(reader.finished().token_ids) for reader in readers] == [8, 8]


def test_a_40k_token_prompt_on_a_slow_model_is_no_stall_C9_F5_P7() -> None:
    """Steps far below their limit, as `worker/engines/mlx/prefill.py` cuts them, for more than two
    limits; nothing is predicted, so that only the steps themselves say that all is well."""
    options = {
        "step_s": 0.05,
        "predicted_s": 0.0,
        "prefill_tokens_per_step": 500,
        "context_length": 65_536,
    }
    model = fake(max_concurrency=4, step_timeout_s=1.5, fake=options)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        beside = Reader(client, "m", "beside", max_tokens=100)
        result = client.complete("m", prompt="p" * LONG_PROMPT_TOKENS, max_tokens=3)
        assert (result.finish_reason, result.resumed) == ("length", 0)
        assert result.usage.prompt_tokens == LONG_PROMPT_TOKENS
        assert len(beside.finished().token_ids) == 100
        after = row(client, "m")
        assert (after["generation"], after["restarts"]) == (1, 0)
        assert after["steps"] <= 100 + LONG_PROMPT_TOKENS // 500, "both in the same steps"


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_40k_token_prompt_on_real_mlx_is_no_stall_C9_F5_P7(tmp_path: Path) -> None:
    """At this depth two cores read some two hundred tokens a second: minutes, under a limit of two
    seconds."""
    folder = make_tiny_model(tmp_path / "tiny", config={"max_position_embeddings": 49_152})
    model = {"path": str(folder), "max_concurrency": 2, "step_timeout_s": 2.0}
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        beside = Reader(client, "m", "beside", max_tokens=40_000).started()
        prompt = [300 + (n * 7919) % 1700 for n in range(LONG_PROMPT_TOKENS)]
        result = client.complete("m", prompt_tokens=prompt, max_tokens=3)
        assert (result.finish_reason, result.resumed) == ("length", 0)
        assert result.usage.prompt_tokens == LONG_PROMPT_TOKENS
        assert beside.is_alive(), "it continued all the while"
        beside.stream.cancel()
        assert beside.finished().finish_reason == "cancelled"
        after = row(client, "m")
        assert (after["generation"], after["restarts"]) == (1, 0)
