"""Every `curl` of the documents is run, as it stands, by a shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.folders import DEFAULT_LISTEN

from support.daemon.daemon import fake
from support.eventually import TIMEOUT_S
from support.gateway.http_daemon import HttpDaemon

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MODELS = ("smollm2", "smollm2-135m")
"""The models that the documents ask."""


def commands() -> list[tuple[str, str]]:
    """Each command with the name of its page: a line of a block, and those that continue it."""
    found = []
    for page in PAGES:
        for block in re.findall(
            r"^```[a-z]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            found += [(page.name, one) for one in re.findall(r"^curl (?:.*\\\n)*.*$", block, re.M)]
    return found


COMMANDS = commands()

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    with HttpDaemon({model: fake() for model in MODELS}) as running:
        yield running


def test_readme_has_a_curl() -> None:
    assert "README.md" in {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_curl_is_answered(daemon: HttpDaemon, tmp_path: Path, page: str, command: str) -> None:
    assert f"http://{DEFAULT_LISTEN}/" in command
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    done = subprocess.run(
        ["sh", "-c", command.replace(f"http://{DEFAULT_LISTEN}", daemon.url)],
        env={**os.environ, "CURL_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"
    assert done.stdout.strip(), page
