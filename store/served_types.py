"""The model types that the installed mlx-lm has code for, found without importing it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

REMAPPING = "MODEL_REMAPPING"
"""The name that mlx-lm has for its table of types that run the code of another."""


def served_types() -> frozenset[str] | None:
    """The model types that can be served; None if mlx-lm is not installed."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    modules = {path.stem for path in (package / "models").glob("*.py")}
    return frozenset(modules | _remapped(package / "utils.py"))


def _remapped(source: Path) -> set[str]:
    """The keys of the table, read from its source; none if it has moved."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return set()
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(target, ast.Name) and target.id == REMAPPING for target in node.targets):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            return {key for key in keys if isinstance(key, str)}
    return set()
