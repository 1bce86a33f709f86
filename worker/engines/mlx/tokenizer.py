"""Loads a folder's tokenizer as mlx-lm does, and finds out which file an error is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_with_mlx_lm
from mlx_lm.utils import _tokenizer_defaults
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...engine import BadModelError
from .loader import shorten

MODEL_CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_TEMPLATE = "chat_template.json"

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""The names of templates that transformers chooses: the second for a request with tools."""


def load_tokenizer(folder: Path, eos_token_ids: Any) -> TokenizerWrapper:
    """Loads it, without ever running code of the folder; what the folder does not say comes from
    mlx-lm's own module for the model type, if that has settings for it.

    Templates are read as transformers reads them, named ones among them, and besides those that it
    reads for processors only.

    Args:
        folder: has passed `check_folder`.
        eos_token_ids: from the model's configuration: an id, a list of them, or None.

    Raises:
        BadModelError: the ids are invalid; names the file.
        Exception: whatever the tokenizer's files provoke; see `tokenizer_error`.
    """
    _check_end_tokens(folder, eos_token_ids)
    # Never code from a model folder, and never a question on standard input about it.
    options = {"trust_remote_code": False, "config": _settings(folder)}
    defaults = _tokenizer_defaults(folder)
    tokenizer = load_with_mlx_lm(folder, options, eos_token_ids, defaults)
    templates = _templates(folder, tokenizer)
    if not templates:
        return tokenizer
    # mlx-lm finds out from one template how the model writes calls.
    options["chat_template"] = tool_template(templates)
    tokenizer = load_with_mlx_lm(folder, options, eos_token_ids, defaults)
    tokenizer.chat_template = templates
    return tokenizer


def tool_template(templates: Any) -> str:
    """Return the template that a request with tools is rendered with; empty if there is none."""
    if isinstance(templates, dict):
        templates = templates.get(TOOL_TEMPLATE) or templates.get(DEFAULT_TEMPLATE)
    return templates if isinstance(templates, str) else ""


def _templates(folder: Path, tokenizer: TokenizerWrapper) -> dict[str, str]:
    """Return a folder's named templates; empty if the tokenizer has a single one, or has none."""
    found = tokenizer.chat_template
    if found is None and not tokenizer.has_chat_template:
        found = _named(_read(folder / PROCESSOR_TEMPLATE).get("chat_template"))
    if not isinstance(found, dict) or not found:
        return {}
    if DEFAULT_TEMPLATE not in found:  # named ones in files hide that of tokenizer_config.json
        own = _named(_read(folder / TOKENIZER_CONFIG).get("chat_template"))
        found = {DEFAULT_TEMPLATE: next(iter(found.values())), **own, **found}
    return found


def _named(value: Any) -> dict[str, str]:
    """Return the templates of a setting: a text, or a list of texts with names."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
    }


def _odd_template(folder: Path) -> Path | None:
    """Return the file of a chat template that is not UTF-8 text, if there is one."""
    for file in (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")):
        if file.is_file():
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return file
    return None


def _has_odd_entry(folder: Path) -> bool:
    """True if a list of chat templates has an entry that transformers does not take."""
    entries = _read(folder / TOKENIZER_CONFIG).get("chat_template")
    return isinstance(entries, list) and len(_named(entries)) < len(entries)


def tokenizer_error(folder: Path, error: Exception) -> BadModelError:
    """Make the error for a tokenizer that cannot be used: it names the file, in one line."""
    named = folder / TOKENIZER
    if isinstance(error, UnicodeDecodeError) and (template := _odd_template(folder)) is not None:
        named = template
    elif not named.exists():
        named = folder
    elif (folder / TOKENIZER_CONFIG).exists() and _is_readable(named):
        named = folder / TOKENIZER_CONFIG
    cause = shorten(error)
    if isinstance(error, KeyError | TypeError) and _has_odd_entry(folder):
        cause = "an entry of chat_template lacks its name or its template"
    if "trust_remote_code" in str(error):
        cause = "it is a program in the model folder, and mlxsup does not run such programs"
    return BadModelError(f"{named}: the tokenizer cannot be used: {cause}")


def _settings(folder: Path) -> PreTrainedConfig:
    """Return the part of config.json by which transformers chooses a tokenizer's class, and no
    more.

    It checks the model's settings by its own rules, which mlx-lm does not share, and such an error
    would look like one of the tokenizer.
    """
    config = _read(folder / MODEL_CONFIG)
    model_type = config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    settings = CONFIG_MAPPING[model_type]() if is_known else PreTrainedConfig()
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(config.get(name), str):
            setattr(settings, name, config[name])
    return settings


def _check_end_tokens(folder: Path, value: Any) -> None:
    ids = value if isinstance(value, list) else [value]
    if value is None or all(type(one) is int for one in ids):
        return
    # mlx-lm prefers what generation_config.json says.
    names = ("generation_config.json", MODEL_CONFIG)
    named = [n for n in names if _read(folder / n).get("eos_token_id") == value]
    place = folder / named[0] if named else folder
    raise BadModelError(
        f"{place}: eos_token_id must be a token id or a list of them, not {json.dumps(value)[:100]}"
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object that `check_folder` has read before; return an empty one if there is
    none."""
    value = json.loads(path.read_bytes()) if path.exists() else {}
    return value if isinstance(value, dict) else {}


def _is_readable(tokenizer: Path) -> bool:
    try:
        Tokenizer.from_file(str(tokenizer))
    except Exception:  # noqa: BLE001  the library raises nothing more special
        return False
    return True
