"""Requests that kill their engine, next to others that must not pay for it (P10, F10).

Real: daemons and worker processes; the engine is fake.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from mlxsup.client import Client, RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually

TOKENS = 40
COUNT = 8
KILLS = 4


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    entry = fake(fake={"step_s": 0.004}, restart=PATIENT, max_concurrency=COUNT)
    with Daemon({"one": entry, "outside": entry}) as daemon:
        yield daemon


def crashes(client: Client, model: str, before: int) -> int:
    """Return how many lives of the worker have ended since."""
    return int(wait_for_state(client, model, "READY")["generation"]) - before


@pytest.mark.parametrize(("at", "how"), [(0, "SIGABRT"), (TOKENS // 2, "exit:70")])
def test_one_of_eight_that_always_crashes_costs_three_crashes_and_fails_alone_P10_F10(
    daemon: Daemon, at: int, how: str
) -> None:
    with daemon.client() as client:
        before = wait_for_state(client, "one", "READY")["generation"]
        prompts = [f"innocent {n} of {how} {at}" for n in range(COUNT - 1)]
        innocent = [Reader(client, "one", prompt, max_tokens=TOKENS) for prompt in prompts]
        poison = Reader(client, "one", f"[[fault crash={how} at={at}]]", max_tokens=TOKENS)
        assert poison.failed().code == "quarantined"
        assert len(poison.tokens) == max(0, at - 1)
        for prompt, reader in zip(prompts, innocent, strict=True):
            assert reader.finished().token_ids == undisturbed(prompt, TOKENS)
        assert crashes(client, "one", before) <= 3
        assert row(client, "one")["quarantined"] >= 1
        with pytest.raises(RequestError) as again:
            client.complete("one", prompt=f"[[fault crash={how} at={at}]]", max_tokens=TOKENS)
        assert again.value.code == "quarantined"
        assert crashes(client, "one", before) <= 3, "refused without a try"


def test_sigkill_from_outside_again_and_again_quarantines_no_request_P10(daemon: Daemon) -> None:
    def all_gained(held: list[int]) -> bool:
        return all(len(one.tokens) > n for one, n in zip(readers, held, strict=True))

    def is_beyond(generation: int) -> bool:
        return int(row(client, "outside")["generation"]) > generation

    with daemon.client() as client:
        before = wait_for_state(client, "outside", "READY")["generation"]
        prompts = [f"runs {n}" for n in range(COUNT)]
        readers = [Reader(client, "outside", prompt, max_tokens=3900) for prompt in prompts]
        for kill in range(KILLS + 1):
            seen = wait_for_state(client, "outside", "READY")
            assert (seen["suspects"], seen["quarantined"]) == (0, 0)
            # Three deaths in a row without a token would end a request.
            held = [len(reader.tokens) for reader in readers]
            eventually(partial(all_gained, held))
            if kill < KILLS:
                os.kill(seen["pid"], signal.SIGKILL)
                eventually(partial(is_beyond, before + kill))
        for prompt, reader in zip(prompts, readers, strict=True):
            reader.stream.cancel()
            result = reader.finished(120)
            assert result.token_ids == undisturbed(prompt, len(result.token_ids))
            assert result.resumed == KILLS
        assert crashes(client, "outside", before) == KILLS
