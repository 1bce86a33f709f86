"""The models of a daemon as Ollama's API lists and describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxsup.protocol.tasks import Task
from mlxsup.protocol.text import timestamp
from mlxsup.protocol.version import VERSION

from ..descriptions import Described
from ..names import LATEST
from .requests import NAMES

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is: programs want a recent one."""

LONG_S = 100 * 365 * 86400.0
"""Until a model goes that stays for ever."""


def version() -> dict[str, Any]:
    """Return `GET /api/version`."""
    return {"version": API_VERSION, "mlxsup": VERSION}


def tag_list(models: Sequence[Described], began: float) -> dict[str, Any]:
    """Return `GET /api/tags`.

    Args:
        models: of the daemon.
        began: seconds since the epoch; the time of a model without files.
    """
    return {"models": [_listed(model) | _modified(model, began) for model in models]}


def loaded_list(models: Sequence[Described], now: float) -> dict[str, Any]:
    """Return `GET /api/ps`; a preset is not listed beside its model."""
    loaded = []
    for model in models:
        row = model.row
        if not model.is_loaded or model.name != row["name"]:
            continue
        left_s = row["unloads_in_s"]
        loaded.append(
            _listed(model)
            | {
                "size": row["footprint_bytes"],
                "size_vram": row["footprint_bytes"],  # CPU and GPU share their memory
                "expires_at": timestamp(now + (LONG_S if left_s is None else left_s)),
                "context_length": model.context_length,
            }
        )
    return {"models": loaded}


def shown(model: Described, began: float) -> dict[str, Any]:
    """Return `POST /api/show`; arguments as for `tag_list`."""
    family = model.family or "unknown"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.context_length,
    }
    if model.said is not None and model.said.parameter_count is not None:
        info["general.parameter_count"] = model.said.parameter_count
    return {
        "license": model.said.licence if model.said else "",
        "modelfile": f"# served by mlxsup\nFROM {_tagged(model)}\n",
        "parameters": _parameters(model),
        "template": model.said.template if model.said else "",
        "details": _details(model),
        "model_info": info,
        "capabilities": _capabilities(model),
        **_modified(model, began),
    }


def _tagged(model: Described) -> str:
    """Return the name with a tag: Ollama's names always have one."""
    row = model.row
    if model.name != row["name"] or LATEST in row["presets"]:
        return model.name
    return f"{model.name}:{LATEST}"


def _listed(model: Described) -> dict[str, Any]:
    name = _tagged(model)
    return {
        "name": name,
        "model": name,
        "size": model.size_bytes,
        "digest": model.digest,
        "details": _details(model),
        "capabilities": _capabilities(model),
    }


def _capabilities(model: Described) -> list[str]:
    """Return them by Ollama's words, which has none for rankings."""
    return [
        *(["embedding"] if model.task is Task.EMBED else []),
        *(["completion"] if model.task is Task.GENERATE else []),
        *(["vision"] if model.sees_images else []),
        *(["tools"] if model.takes_tools else []),
        *(["thinking"] if model.thinks else []),
    ]


def _details(model: Described) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "mlx",
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": model.parameter_size,
        "quantization_level": model.quantization,
    }


def _modified(model: Described, began: float) -> dict[str, Any]:
    return {"modified_at": timestamp(began if model.modified_at is None else model.modified_at)}


def _parameters(model: Described) -> str:
    """Return the model's own sampling parameters, a line each."""
    preset = model.row["presets"].get(model.name.rpartition(":")[2], {})
    given = {**(model.said.sampling if model.said else {}), **preset}
    lines = [
        f"{NAMES.get(name, name):<30} {value}"
        for name, value in given.items()
        if isinstance(value, int | float)
    ]
    return "\n".join(lines)
