"""The index of its modules that the tests keep for transformers is the one that it builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils import import_utils

from support.quick_imports import transformers_index

pytestmark = pytest.mark.mlx

MODELS = Path(transformers.__file__).parent / "models"
ASKED = [
    (MODELS, "models"),
    (MODELS / "__init__.py", None),
    (MODELS / "auto" / "__init__.py", None),
]
"""What transformers asks for while it is imported."""

PROGRAM = """\
from transformers.utils import import_utils
print(type(import_utils.define_import_structure).__name__, import_utils.__file__)
"""


def test_what_is_read_is_what_transformers_builds(tmp_path: Path) -> None:
    define = import_utils.define_import_structure.__wrapped__
    built = [define(place, prefix) for place, prefix in ASKED]
    keep = transformers_index.kept(os.fspath(tmp_path), define)
    assert [keep(place, prefix) for place, prefix in ASKED] == built

    def define_again(*asked: Any) -> Any:
        raise AssertionError(f"built again: {asked}")

    read = transformers_index.kept(os.fspath(tmp_path), define_again)
    assert [read(place, prefix) for place, prefix in ASKED] == built


@pytest.mark.parametrize("is_kept", [True, False])
def test_new_process_reads_it_if_there_is_a_folder(is_kept: bool, tmp_path: Path) -> None:
    folder = tmp_path if is_kept else tmp_path / "none"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {transformers_index.FOLDER: os.fspath(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    name, place = done.stdout.split()
    assert name == ("function" if is_kept else "_lru_cache_wrapper")
    assert place == import_utils.__file__
    assert len(list(tmp_path.iterdir())) == is_kept
