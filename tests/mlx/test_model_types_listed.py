"""Every model file of the installed mlx-lm is tried or named; known faults are at their lines."""

from __future__ import annotations

from pathlib import Path

import mlx_lm
import pytest

from support.model_types.faults import BATCH_FAULTS, LOAD_FAULTS, BatchFault
from support.model_types.listed import MODEL_TYPES, NO_MODEL, NOT_TRIED, model_file

pytestmark = pytest.mark.mlx

PACKAGE = Path(mlx_lm.__file__).parent


def test_every_model_file_is_tried_or_named() -> None:
    files = {path.stem for path in (PACKAGE / "models").glob("*.py")} - {"__init__"}
    tried = {model_file(model_type.config) for model_type in MODEL_TYPES}

    assert files - tried == set(NO_MODEL) | set(NOT_TRIED)
    assert tried <= files


@pytest.mark.parametrize("fault", [*BATCH_FAULTS, *LOAD_FAULTS], ids=lambda f: f"{f.file}:{f.line}")
def test_fault_is_at_its_line(fault: BatchFault) -> None:
    """A release that fixes or moves one fails here, so that the list stays true."""
    line = (PACKAGE / fault.file).read_text(encoding="utf-8").splitlines()[fault.line - 1]

    assert fault.symbol in line
    assert set(fault.rows) <= {model_type.name for model_type in MODEL_TYPES}
