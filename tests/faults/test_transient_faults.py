"""Faults that pass: an engine that is healthy again soon runs all its rows together again (P25)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mlxsup.client import Client

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually

ROWS = 8
TOKENS = 600
"""Six seconds of an answer: on a busy machine, too, two faults and a newcomer come within it."""
STEPS_OF_A_TURN = 4 + 3
"""The tokens of a probation, and what it takes to read the prompt and to leave the batch."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    restart = {**PATIENT, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}
    entry = fake(fake={"step_s": 0.01}, restart=restart, max_concurrency=ROWS + 1)
    with Daemon({"m": entry}) as daemon:
        yield daemon


def strike(client: Client, readers: list[Reader]) -> int:
    """A SIGSEGV once every row has gained a token in this life; returns the new generation."""
    held = [len(reader.tokens) for reader in readers]
    eventually(
        lambda: all(len(r.tokens) > n for r, n in zip(readers, held, strict=True)), timeout_s=60.0
    )
    before = row(client, "m")
    os.kill(before["pid"], signal.SIGSEGV)
    eventually(lambda: row(client, "m")["generation"] > before["generation"], timeout_s=60.0)
    return int(wait_for_state(client, "m", "READY")["generation"])


def test_two_transient_faults_cost_a_few_steps_and_make_nobody_wait_P25_F10(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        prompts = [f"suspect {n}" for n in range(ROWS)]
        readers = [Reader(client, "m", prompt, max_tokens=TOKENS) for prompt in prompts]
        strike(client, readers)
        generation = strike(client, readers)
        newcomer = Reader(client, "m", "newcomer", max_tokens=TOKENS).started()
        assert all(reader.is_alive() for reader in readers), "it waited for a suspect to end"
        for prompt, reader in zip(prompts, readers, strict=True):
            result = reader.finished(120)
            assert result.token_ids == undisturbed(prompt, TOKENS)
            assert result.resumed == 2
        assert newcomer.finished(120).token_ids == undisturbed("newcomer", TOKENS)
        assert row(client, "m")["generation"] == generation, "no third crash"
        # One after the other it would be ROWS times as many.
        assert row(client, "m")["steps"] <= TOKENS + ROWS * 2 * STEPS_OF_A_TURN
        assert row(client, "m")["suspects"] == 0
