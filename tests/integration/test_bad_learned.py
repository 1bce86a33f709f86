"""What an earlier worker has kept and is wrong is ignored and said once, and the model serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bad_learned import PACES, BadLearned
from support.daemon import Daemon
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("case", PACES, ids=lambda case: case.name)
def test_it_is_said_once_and_the_model_serves(tiny: Path, case: BadLearned) -> None:
    if not Path(case.needs).exists():
        pytest.skip(f"needs {case.needs}")
    daemon = Daemon({"m": {"path": str(tiny), "max_concurrency": 1}})
    folder = daemon.folder / "run" / "learned" / "m"
    folder.mkdir(parents=True)
    folder.parent.parent.chmod(0o700)
    case.prepare(folder)
    with daemon, daemon.client() as client:
        client.load("m")
        assert client.complete("m", prompt="hi", max_tokens=2).finish_reason == "length"
        log = (daemon.logs / "m.log").read_text()
    assert log.count(case.words) == 1
    assert "model warmed up model=m rows=1 pace=learned" not in log
