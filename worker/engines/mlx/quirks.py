"""Known faults of model types in mlx-lm itself, and what a worker does about them.

No MLX here. A fault is named by file and line of mlx-lm, and
`tests/unit/test_engine_start.py` fails when a release moves or fixes that line, so that no
entry outlives its fault. Faults that show only when rows share a pass are not here: the probe at
the end of a load finds those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from mlxsup.protocol.model_files import MLX_ADAPTER, PEFT_ADAPTER


class Remedy(Enum):
    """What a worker does about a fault."""

    REFUSE = auto()
    """Refuse the model: no answer would be right."""
    WIDEN_WINDOWS = auto()
    """Each cache of a sliding window keeps one key more than mlx-lm says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of mlx-lm that makes a model type wrong even for a single request.

    Attributes:
        model_type: as config.json names it.
        file: of mlx_lm/models.
        line: in that file, from 1.
        symbol: text of that line.
        what: what is wrong, and what follows from it; a sentence without its full stop.
        remedy: see `Remedy`.
        concerns: whether a config.json of the type is affected.
    """

    model_type: str
    file: str
    line: int
    symbol: str
    what: str
    remedy: Remedy
    concerns: Callable[[Mapping[str, Any]], bool] = lambda config: True

    def __str__(self) -> str:
        return f"{self.what} (mlx_lm/models/{self.file}:{self.line})"


def _has_sliding_layers(config: Mapping[str, Any]) -> bool:
    """As plamo3 counts: each n-th layer, by default the 8th, sees everything; the others do not."""
    return config.get("sliding_window_pattern") != 1 and config.get("num_hidden_layers") != 0


KNOWN_FAULTS = (
    KnownFault(
        model_type="plamo3",
        file="plamo3.py",
        line=236,
        symbol="window_size=self.window_size + 1",
        what="mlx-lm lets a token see window_size tokens before itself but keeps one fewer, so "
        "that past the window its answers depend on the pieces in which a prompt is read; this "
        "worker keeps one more, and its answers there are not those of mlx_lm.generate",
        remedy=Remedy.WIDEN_WINDOWS,
        concerns=_has_sliding_layers,
    ),
    KnownFault(
        model_type="phi3small",
        file="phi3small.py",
        line=146,
        symbol="scores = scores + mask",
        what="mlx-lm adds a mask of true and false to the scores of the block-sparse layers, so "
        "that the tokens of a prompt see those behind them and every answer is wrong",
        remedy=Remedy.REFUSE,
    ),
    KnownFault(
        model_type="olmo",
        file="olmo.py",
        line=93,
        symbol="scores += mask",
        what="mlx-lm adds the name of a mask to the scores, so that no prompt of two tokens can be "
        "read (olmo2 and olmo3 are other model types, and can)",
        remedy=Remedy.REFUSE,
    ),
)


def find_fault(config: Mapping[str, Any]) -> KnownFault | None:
    """Return the fault that concerns a model, if one is known.

    Args:
        config: what config.json holds.
    """
    for fault in KNOWN_FAULTS:
        if fault.model_type == config.get("model_type") and fault.concerns(config):
            return fault
    return None


def find_warnings(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the warnings about a model that loads, a sentence each.

    Args:
        path: the model folder.
        config: the content of its config.json.
    """
    warnings = [
        f"{name} is ignored unless a request names it; add its folder to the model's adapters in "
        "the configuration"
        for name in (MLX_ADAPTER, PEFT_ADAPTER)
        if (path / name).is_file()
    ]
    fault = find_fault(config)
    if fault is not None and fault.remedy is not Remedy.REFUSE:
        warnings.append(str(fault))
    return tuple(warnings)
