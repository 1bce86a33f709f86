"""What an exception in a step means for the rows that were in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxsup.worker.engine import GpuFaultElsewhereError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.passes import SerialPasses, TogetherPasses

from support.mlx_rows import loaded_engine, make_row
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    with loaded_engine(make_tiny_model(tmp_path_factory.mktemp("tiny"))) as engine:
        engine.insert(make_row(1, [1, 2, 3]))
        yield engine


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[malloc] Unable to allocate 99 bytes.", MemoryError),
        ("[METAL] Command buffer execution failed: Innocent Victim", GpuFaultElsewhereError),
        ("There is no Stream(gpu, 1) in current thread.", RuntimeError),
    ],
)
def test_what_broke_a_step_decides_who_is_accused(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    """Exit 75 and exit 72 accuse nobody; exit 70 makes suspects of the rows."""

    def broken(*_: object) -> None:
        raise RuntimeError(text)

    for passes in (TogetherPasses, SerialPasses):
        monkeypatch.setattr(passes, "step", broken)
    with pytest.raises(Exception, match=r"allocate|Innocent|Stream") as raised:
        engine.step()
    assert type(raised.value) is kind
