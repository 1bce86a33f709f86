"""Loads that fail: once and named where nothing can heal it, again where it can (P9, P11)."""

from __future__ import annotations

import pytest

from mlxsup.client import RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed


def test_permanent_faults_are_tried_once_and_name_the_file_P11() -> None:
    """Files that must be corrected: tests/mlx/test_bad_models.py."""
    models = {
        name: fake(fake={"load_error": name}, preload=False, restart=PATIENT)
        for name in ("missing", "bad")
    }
    with Daemon(models) as daemon, daemon.client() as client:
        for name, code, words in (("missing", 66, "does not exist"), ("bad", 65, "config.json")):
            waiting = Reader(client, name, "waits", max_tokens=1)
            with pytest.raises(RequestError, match=words) as caught:
                client.load(name)
            assert (caught.value.code, caught.value.retryable) == ("load_failed", False)
            assert waiting.failed().code == "load_failed"
            failed = row(client, name)
            assert (failed["state"], failed["generation"]) == ("FAILED", 1)
            assert failed["last_exit"]["code"] == code
            with pytest.raises(RequestError) as again:
                client.complete(name, prompt="x", max_tokens=1)
            assert again.value.code == "model_failed"
            assert row(client, name)["generation"] == 1, "no second try"


def test_a_load_that_dies_is_tried_as_often_as_the_entry_says_P9() -> None:
    restart = {"max_restarts": 2, "backoff_initial_s": 0.01, "backoff_max_s": 0.01}
    models = {
        "always": fake(fake={"crash_in_load": "exit:70"}, restart=restart, preload=False),
        "once": fake(fake={"load_error": "exception", "load_fault_generations": 1}, preload=False),
        "memory": fake(fake={"load_error": "memory"}, restart=restart, preload=False),
    }
    with Daemon(models) as daemon, daemon.client() as client:
        raised = "RuntimeError: life 1 raises this on demand"
        daemon.provoke("Traceback", model="once", pattern=raised, at_most=1)
        waiting = [Reader(client, "once", f"waits {n}", max_tokens=3) for n in range(3)]
        for number, reader in enumerate(waiting):
            assert reader.finished().token_ids == undisturbed(f"waits {number}", 3)
        assert row(client, "once")["generation"] == 2
        for name, code in (("always", 70), ("memory", 75)):
            failed = Reader(client, name, "waits", max_tokens=1).failed()
            assert failed.code == "load_failed"
            seen = wait_for_state(client, name, "FAILED")
            assert (seen["generation"], seen["last_exit"]["code"]) == (3, code)
