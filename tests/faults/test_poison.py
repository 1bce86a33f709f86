"""Requests that kill their engine, next to others that must not pay for it (P10, F10).

Real: daemons and worker processes; the engine is fake, and in the last test MLX with a tiny model.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlxsup.client import Client, Delta, RequestError

from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model
from support.reference import greedy_answers

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
            eventually(partial(all_gained, held), timeout_s=60.0)
            if kill < KILLS:
                os.kill(seen["pid"], signal.SIGKILL)
                eventually(partial(is_beyond, before + kill))
        for prompt, reader in zip(prompts, readers, strict=True):
            reader.stream.cancel()
            result = reader.finished(120)
            assert result.token_ids == undisturbed(prompt, len(result.token_ids))
            assert result.resumed == KILLS
        assert crashes(client, "outside", before) == KILLS


# ---------------------------------------------------------------- a real engine

ABORTING = """
import os, sys
from mlxsup.worker import __main__ as worker
from mlxsup.worker.engines.mlx import engine as mlx_engine

class AbortingEngine(mlx_engine.MlxEngine):
    '''Aborts when a row whose prompt begins with MARKER has decoded as many tokens as the second
    id of its prompt says: in the step, before anything of it is sent.'''

    def insert(self, row):
        if row.tokens[0] == {marker} and len(row.tokens) > 2:
            marked[row.key] = [row.tokens[1], len(row.delivered)]
        return super().insert(row)

    def step(self):
        result = super().step()
        for token in result.tokens:
            if token.key in marked:
                marked[token.key][1] += 1
                if marked[token.key][1] == marked[token.key][0]:
                    os.abort()
        return result

marked = {{}}
mlx_engine.MlxEngine = AbortingEngine
worker.leave(worker.main(sys.argv[1:]))
"""
MARKER, AT = 7, 35


@pytest.mark.mlx
def test_one_of_eight_that_aborts_mlx_costs_three_crashes_P10_F10(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    prompts = [f"tell me of {n}" for n in range(COUNT - 1)]
    truth = greedy_answers(folder, prompts, TOKENS)
    entry = {"path": str(folder), "preload": True, "restart": PATIENT, "max_concurrency": COUNT}
    argv = [sys.executable, "-P", "-c", ABORTING.format(marker=MARKER)]
    with ScriptedDaemon({"m": entry}).scripted(argv=argv) as daemon, daemon.client() as client:
        before = wait_for_state(client, "m", "READY")["generation"]
        innocent = [Reader(client, "m", prompt, max_tokens=TOKENS) for prompt in prompts]
        stream = client.generate("m", prompt_tokens=[MARKER, AT, 300, 301], max_tokens=TOKENS)
        deltas: list[Delta] = []
        with pytest.raises(RequestError) as caught:
            deltas.extend(stream)
        assert caught.value.code == "quarantined"
        assert sum(len(delta.token_ids) for delta in deltas) == AT - 1
        for expected, reader in zip(truth, innocent, strict=True):
            assert reader.finished(120).token_ids == expected
        assert crashes(client, "m", before) <= 3
