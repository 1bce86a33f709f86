"""What processes find in their environment: secrets only where they are used."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.download import Repository
from mlxsup.protocol.launch import child_environment
from mlxsup.supervisor.core.actions import StartDownload
from mlxsup.supervisor.downloads import DownloadKeeper

from support.daemon.daemon import row, wait_for_state
from support.eventually import eventually
from support.eventually_async import eventually_async
from support.gateway.http_daemon import HttpDaemon, gateway_of
from support.models.tiny_model import make_tiny_model

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_secret",
    "OPENAI_API_KEY": "sk-secret",
    "MLXSUP_API_KEY": "key-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "AWS_SESSION": "opaque-secret",
    "DATABASE_URL": "postgres://u:pw-secret@h/db",
    "HF_ENDPOINT": "https://u:pw-secret@mirror.example",
    "https_proxy": "http://u:pw-secret@proxy.example",
    "GITHUB_PAT": "ghp-secret",
    "XDG_SESSION_COOKIE": "cookie-secret",
}
NEEDED = {"HF_HUB_CACHE": "/models", "MLX_METAL_FAST_SYNCH": "1", "OMP_NUM_THREADS": "2"}


class DaemonWithSecrets(HttpDaemon):
    """A daemon that was started with everything above in its environment."""

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it and returns when its gateway answers."""
        super().start(environment=SECRETS | NEEDED)


@pytest.mark.mlx
def test_no_worker_spare_or_gateway_inherits_a_secret(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    models = {"m": {"path": str(folder), "preload": True}}
    with (
        DaemonWithSecrets(models, supervisor={"spare_workers": 1}) as daemon,
        daemon.client() as client,
    ):
        wait_for_state(client, "m", "READY")

        def spares() -> list[int]:
            return [one["pid"] for one in client.status()["spares"]["workers"]]

        eventually(lambda: len(spares()) == 1)
        for pid in (row(client, "m")["pid"], gateway_of(client)["pid"], *spares()):
            found = psutil.Process(pid).environ()
            assert [name for name in found if "secret" in found[name]] == []
            assert found.items() >= NEEDED.items()
            assert found["PATH"] == os.environ["PATH"]


def test_a_download_has_the_token_and_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    posted: list[object] = []
    blocks: list[str] = []
    around: Any = SimpleNamespace(
        log=SimpleNamespace(write=lambda *_, **__: None, block=blocks.append),
        post=posted.append,
        now=lambda: 0.0,
    )
    prints = "import os; print(sorted(os.environ.items()))"

    async def found(*_: object) -> None:
        """The folder does not matter here."""

    keeper = DownloadKeeper(around, found, (sys.executable, "-I", "-c", prints))

    async def download() -> None:
        async with asyncio.TaskGroup() as tasks:
            action = StartDownload(number=1, repository=Repository("org/model", "main"))
            keeper.carry_out(action, tasks)
            await eventually_async(lambda: bool(posted), timeout_s=30.0)

    asyncio.run(download())
    for item in SECRETS.items():
        assert repr(item) in "".join(blocks)


@pytest.mark.parametrize("name", ["HF_HOME", "LC_ALL", "TOKENIZERS_PARALLELISM", "CUDA_HOME"])
def test_child_environment_keeps_settings_of_libraries(name: str) -> None:
    assert child_environment({name: "x"}) == {name: "x"}
