"""A tree from before is measured by its own code, next to a checkout that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare import step_us

CHILD = """
import json, mlxsup.core
print(json.dumps({"file": mlxsup.core.__file__, "us": {"1": mlxsup.core.US}}))
"""


@pytest.mark.parametrize("kind", ["regular", "namespace"])
def test_a_base_is_measured_by_its_own_code(tmp_path: Path, kind: str) -> None:
    package, child = tmp_path / "typings" / "mlxsup", tmp_path / "child.py"
    package.mkdir(parents=True)
    (package / "core.py").write_text("US = 7.0")
    if kind == "regular":
        (package / "__init__.py").touch()
    child.write_text(CHILD)
    assert step_us(tmp_path, [1], child) == {1: 7.0}
