"""A daemon that runs from an environment in which a wheel is installed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.environments import Environment, outside_variables
from support.eventually import TIMEOUT_S

FAKE = 'engine = "fake"'


@contextmanager
def daemon_of(environment: Environment, *, model: str = FAKE) -> Iterator[Path]:
    """A daemon with a model `m`; gives its configuration file.

    If nobody has stopped it before, it is stopped in the end.

    Args:
        environment: its command `mlxsup` is run.
        model: what the table of the model says.
    """
    # A socket's path has at most 103 bytes, and pytest's own folders are longer than that.
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        folder = Path(name)
        config = folder / "config.toml"
        config.write_text(
            f'[supervisor]\nruntime_dir = "{folder}/run"\nlog_dir = "{folder}/logs"\n'
            f"[models.m]\n{model}\n"
        )
        with (
            (folder / "output").open("w") as output,
            subprocess.Popen(
                [environment.folder / "bin" / "mlxsup", "start", "--config", config],
                cwd=environment.elsewhere,
                env=outside_variables(),
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            ) as daemon,
        ):
            assert daemon.stdout is not None
            try:
                assert "ipc://" in daemon.stdout.readline(), (folder / "output").read_text()
                yield config
            finally:
                daemon.terminate()
                assert daemon.wait(TIMEOUT_S) == 0
