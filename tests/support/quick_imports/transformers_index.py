"""Keeps the index of its modules that transformers builds anew in every process that imports it.

transformers reads all of its source files, twice, to learn which names each of them exports: half
of the processor time that an MLX worker needs to start. Its own function builds the index here too,
but only once for each installed version; all later processes read what was written then.
"""

from __future__ import annotations

import os
import sys

# Every process imports this first: what only the finder needs is imported by the finder.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Define = Callable[..., dict[frozenset[str], dict[str, set[str]]]]

FOLDER = "MLXSUP_TEST_TRANSFORMERS_INDEX"
"""The variable with the folder in which indexes are kept, by version; without it, nothing is."""

MODULE = "transformers.utils.import_utils"


class Finder:
    """Finds the module that has the function, once, and replaces it when the module has run.

    Args:
        folder: in which indexes are kept.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """As every finder of the import system."""
        if name != MODULE:
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        run = loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            found: Any = module
            os.makedirs(self._folder, exist_ok=True)
            found.define_import_structure = kept(self._folder, found.define_import_structure)

        loader.exec_module = run_and_replace
        return spec


def kept(folder: str, define: Define) -> Define:
    """The same function, which reads its results from the folder if they are there."""
    import functools
    import marshal
    from importlib.metadata import version

    @functools.wraps(define)
    def define_or_read(module_path: Any, prefix: str | None = None) -> Any:
        place = os.path.abspath(module_path).replace(os.sep, "!")
        file = os.path.join(folder, f"{version('transformers')}{place}!{prefix}")
        try:
            with open(file, "rb") as index:
                return marshal.load(index)  # noqa: S302  these tests wrote it
        except FileNotFoundError:
            pass
        defined = define(module_path, prefix)
        mine = f"{file}.{os.getpid()}"
        with open(mine, "wb") as index:
            marshal.dump(defined, index)
        os.replace(mine, file)
        return defined

    return define_or_read


def install() -> None:
    """Has this process use the indexes, if there is a folder for them."""
    folder = os.environ.get(FOLDER)
    if folder:
        sys.meta_path.insert(0, Finder(folder))
