"""The engine over mlx-lm; the only importer of MLX."""

import resource
import sys
from types import ModuleType
from typing import cast

from mlxsup.protocol.launch import lower_limit

# mlx-lm needs of transformers only what runs without torch; with it, an import takes ten times as
# long. `import torch` fails from now on, as if it were not installed.
sys.modules.setdefault("torch", cast(ModuleType, None))

_setrlimit = resource.setrlimit


def _set_limit(which: int, limits: tuple[int, int]) -> None:
    """Set a limit of this process; keep that of open files if the system refuses another one.

    mlx-lm asks for 4,096 files while it is imported, and could not be where the hard limit is
    lower, as after `ulimit -n 1024`.
    """
    try:
        _setrlimit(which, limits)
    except ValueError:
        if which != resource.RLIMIT_NOFILE:
            raise


resource.setrlimit = _set_limit


def limit_memory(most_bytes: int) -> None:
    """Have the system refuse this process more memory; macOS does not keep to the limit."""
    if sys.platform == "linux":
        lower_limit(resource.RLIMIT_DATA, most_bytes)
