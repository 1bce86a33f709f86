"""The engine over mlx-lm; the only importer of MLX."""

import sys
from types import ModuleType
from typing import cast

# mlx-lm needs of transformers only what runs without torch; with it, an import takes ten times as
# long. `import torch` fails from now on, as if it were not installed.
sys.modules.setdefault("torch", cast(ModuleType, None))
