"""What the estimate knows of model types by name, held against the sources of mlx-lm.

The sources are read and not imported: the supervisor does without MLX, and so do these tests.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from mlxsup.supervisor.memory.known_types import KNOWN_TYPES
from mlxsup.supervisor.memory.windows import WINDOWED

NOT_COMPARED = {"gear", "muse_spark"}
"""Types with windows whose caches cannot be looked at on every machine, so that a remark stays."""


@cache
def folder_of_mlx_lm() -> Path:
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


@cache
def other_names() -> dict[str, str]:
    """The module of each type whose name is not that of its module."""
    for node in ast.parse((folder_of_mlx_lm() / "utils.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("mlx-lm has no MODEL_REMAPPING")


def module_of(model_type: str) -> Path:
    return folder_of_mlx_lm() / "models" / f"{other_names().get(model_type, model_type)}.py"


def defaults_in(module: Path, names: tuple[str, ...]) -> set[int]:
    """The numbers that a module gives fields of these names, or else those it imports give."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    fields = [n for n in nodes if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) in names]
    if not fields:
        beside = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 1]
        texts = {n.module or alias.name for n in beside for alias in n.names} - {"base", "cache"}
        return {
            size for text in texts for size in defaults_in(module.with_name(f"{text}.py"), names)
        }
    values = [ast.literal_eval(field.value) if field.value else None for field in fields]
    return {value for value in values if value is not None}


# Each is one test of all names: as parameters, a wrong name would only be another test.


def test_the_known_types_are_types_of_mlx_lm() -> None:
    assert {name for name in KNOWN_TYPES if not module_of(name).is_file()} == set()


def test_the_types_with_windows_are_known() -> None:
    assert set(WINDOWED) - KNOWN_TYPES == NOT_COMPARED
    assert {name for name in NOT_COMPARED if not module_of(name).is_file()} == set()


def test_a_window_without_a_size_has_the_one_that_mlx_lm_gives_it() -> None:
    sizes = {name: ({size} if size else set()) for name, (_, _, size) in WINDOWED.items()}
    found = {name: defaults_in(module_of(name), names) for name, (_, names, _) in WINDOWED.items()}
    assert sizes == found
