"""docs/models.md names every model file of the installed mlx-lm, and every fault where it is."""

from __future__ import annotations

import re
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.utils import MODEL_REMAPPING

from support.model_types.faults import BATCH_FAULTS, LOAD_FAULTS, BatchFault
from support.model_types.listed import MODEL_TYPES, NO_MODEL, NOT_TRIED, model_file
from support.model_types.table import DOCUMENT, UNEQUAL_ALONE, UNLOADABLE, replace_part

pytestmark = pytest.mark.mlx

PACKAGE = Path(mlx_lm.__file__).parent


def test_every_model_file_of_mlx_lm_has_a_row_or_a_reason() -> None:
    files = {path.stem for path in (PACKAGE / "models").glob("*.py")} - {"__init__"}
    tried = {model_file(model_type.config) for model_type in MODEL_TYPES}

    assert files - tried == set(NO_MODEL) | set(NOT_TRIED)
    assert tried <= files


def test_every_name_is_of_one_row() -> None:
    names = [model_type.name for model_type in MODEL_TYPES]

    assert len(names) == len(set(names))


def test_the_document_has_a_row_for_each_model_type() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index("<!-- table") : text.index("<!-- end of table")]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)

    assert sorted(rows) == sorted(model_type.name for model_type in MODEL_TYPES)


def test_the_document_calls_nothing_wrong_but_what_is_known() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index("<!-- table") : text.index("<!-- end of table")]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]

    assert {row[0].strip("`") for row in cells if row[2] != "yes"} == set(UNLOADABLE)
    wrong = {row[0].strip("`") for row in cells if "**wrong**" in row or "**raises**" in row}
    assert wrong <= set(UNEQUAL_ALONE)


@pytest.mark.parametrize("fault", [*BATCH_FAULTS, *LOAD_FAULTS], ids=lambda f: f"{f.file}:{f.line}")
def test_a_fault_of_mlx_lm_is_at_its_line(fault: BatchFault) -> None:
    """A release that fixes or moves one fails here, so that the document stays true."""
    line = (PACKAGE / fault.file).read_text(encoding="utf-8").splitlines()[fault.line - 1]

    assert fault.symbol in line
    assert set(fault.rows) <= {model_type.name for model_type in MODEL_TYPES}


def test_other_names_of_a_model_type_are_those_of_mlx_lm() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    part = text[text.index("<!-- other names") : text.index("<!-- end of other names")]

    assert dict(re.findall(r"`([^`]+)` as `([^`]+)`", part)) == MODEL_REMAPPING


def test_a_part_of_the_document_is_replaced_between_its_marks() -> None:
    text = "a\n<!-- table: made by `make models` -->\nold\n<!-- end of table -->\nb\n"

    assert replace_part(text, "table", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="substring not found"):
        replace_part(text, "exceptions", "new")
