"""Has one module of the product read changed text: a folder for the PYTHONPATH of a daemon.

`MLXSUP_PLANTED` holds a map as JSON: `module`, and the texts `right` and `wrong`.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType


class Loader(importlib.machinery.SourceFileLoader):
    """Never from a cache, and with the text changed."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the changed text."""
        source = self.get_data(self.path).decode()
        assert source.count(PLANTED["right"]) == 1, "the planted bug is out of date"
        changed = source.replace(PLANTED["right"], PLANTED["wrong"])
        return self.source_to_code(changed.encode(), self.path)


class Finder(importlib.abc.MetaPathFinder):
    """Finds that one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own specification, with another loader."""
        if fullname != PLANTED["module"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None, "the module of the planted bug is not there"
        assert spec.origin is not None
        spec.loader = Loader(fullname, spec.origin)
        return spec


if planted := os.environ.get("MLXSUP_PLANTED"):
    PLANTED = json.loads(planted)
    sys.meta_path.insert(0, Finder())
