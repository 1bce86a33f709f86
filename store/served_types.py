"""The model types that the installed mlx-lm has code for, found without importing it."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path

REMAPPING = "MODEL_REMAPPING"
"""The name that mlx-lm has for its table of types that run the code of another."""

SUFFIX = ".py"


class ServedTypes:
    """The model types that can be served.

    Args:
        package: the folder of mlx-lm.
    """

    def __init__(self, package: Path) -> None:
        self._package = package
        names = os.listdir(package / "models")
        self._modules = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        self._remapped: set[str] | None = None

    def __contains__(self, kind: str) -> bool:
        """Whether models of a type can be served; most types have a module of their name."""
        if kind in self._modules:
            return True
        if self._remapped is None:
            self._remapped = _remapped(self._package / "utils.py")
        return kind in self._remapped


def served_types() -> ServedTypes | None:
    """The model types that can be served; None if mlx-lm is not installed."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return ServedTypes(Path(spec.submodule_search_locations[0]))


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
