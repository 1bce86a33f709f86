"""Loads that fail: once and named where nothing can heal it, again where it can (P9, P11)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxsup.client import RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.models.tiny_model import make_tiny_model

WEIGHTS = "model.safetensors"


def cut(path: Path, keep_bytes: int) -> None:
    """Leaves only the beginning of a file."""
    os.truncate(path, keep_bytes)


def write(path: Path, text: str) -> None:
    """Replaces a file."""
    path.write_text(text)


def name_a_shard_that_is_missing(folder: Path) -> None:
    """An index that names a second file."""
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "folder-missing": (shutil.rmtree, 66, ""),
    "config-bad": (lambda f: write(f / "config.json", "{ half"), 65, "config.json"),
    "shard-truncated": (lambda f: cut(f / WEIGHTS, 100_000), 65, WEIGHTS),
    "shard-of-two-missing": (name_a_shard_that_is_missing, 66, "model-00002-of-00002"),
    "no-permission": (lambda f: (f / WEIGHTS).chmod(0), 65, WEIGHTS),
}


class WithoutPrivilege(Daemon):
    """As root: without the right to read what its mode forbids."""

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """The command line, without that capability."""
        dropped = "--bounding-set=-dac_override,-dac_read_search"
        return ["setpriv", dropped, *Daemon.command(*arguments)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One model with each fault, and one that serves beside them."""
    base = tmp_path_factory.mktemp("models")
    whole = make_tiny_model(base / "whole")
    models = {"other": fake(fake={"step_s": 0.005})}
    for name, (spoil, _, _) in FAULTS.items():
        folder = shutil.copytree(whole, base / name)
        spoil(folder)
        models[name] = {"path": str(folder), "preload": False, "restart": PATIENT}
    is_root = os.geteuid() == 0
    kind = WithoutPrivilege if is_root and shutil.which("setpriv") else Daemon
    with kind(models) as daemon:
        yield daemon


@pytest.mark.mlx
@pytest.mark.parametrize("name", FAULTS)
def test_a_permanent_fault_is_tried_once_and_names_the_file_P11(daemon: Daemon, name: str) -> None:
    if name == "no-permission" and type(daemon) is Daemon and os.geteuid() == 0:
        pytest.skip("root may read everything, and setpriv (util-linux) is not here")
    _, code, file = FAULTS[name]
    with daemon.client() as client:
        other = Reader(client, "other", f"beside {name}", max_tokens=100).started()
        waiting = Reader(client, name, "waits", max_tokens=1)
        with pytest.raises(RequestError) as caught:
            client.load(name)
        assert (caught.value.code, caught.value.retryable) == ("load_failed", False)
        assert f"/{name}" in caught.value.message
        assert file in caught.value.message
        assert waiting.failed().code == "load_failed"
        failed = row(client, name)
        assert (failed["state"], failed["generation"]) == ("FAILED", 1)
        assert failed["last_exit"]["code"] == code
        with pytest.raises(RequestError) as again:
            client.complete(name, prompt="x", max_tokens=1)
        assert again.value.code == "model_failed"
        assert row(client, name)["generation"] == 1, "no second try"
        assert other.finished().token_ids == undisturbed(f"beside {name}", 100)


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


def test_a_load_that_raises_the_same_twice_is_given_up_P11() -> None:
    restart = {"max_restarts": 8, "backoff_initial_s": 0.01, "backoff_max_s": 0.01}
    models = {"m": fake(fake={"load_error": "exception"}, restart=restart, preload=False)}
    cause = "RuntimeError: life {} raises this on demand, as the time before"
    with Daemon(models) as daemon, daemon.client() as client:
        raised = "RuntimeError: life [1-4] raises this on demand"
        daemon.provoke("Traceback", model="m", pattern=raised, at_most=4)
        failed = Reader(client, "m", "waits", max_tokens=1).failed()
        assert (failed.code, failed.retryable) == ("load_failed", False)
        assert cause.format(2) in failed.message
        seen = row(client, "m")
        assert (seen["state"], seen["generation"]) == ("FAILED", 2)
        assert (seen["last_exit"]["reason"], seen["last_exit"]["code"]) == ("load_error", 70)
        with pytest.raises(RequestError) as again:
            client.complete("m", prompt="x", max_tokens=1)
        assert again.value.code == "model_failed"
        with pytest.raises(RequestError):  # a person may have corrected it: from the start
            client.load("m")
        seen = wait_for_state(client, "m", "FAILED")
        assert (seen["generation"], cause.format(4) in seen["cause"]) == (4, True)
