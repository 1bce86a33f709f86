"""What a reload does not change: it takes effect at the next start."""

from __future__ import annotations

from .load import DaemonConfig

FIXED_KEYS = {
    "runtime_dir": "runtime_dir",
    "log_dir": "log_dir",
    "log_level": "log_level",
    "log_format": "log_format",
    "prevent_sleep": "prevent_sleep",
    "gateway": "gateway",
    "gateway_rules": "gateway",
}
"""Attributes of a configuration, and the key of `[supervisor]` or the table that has them."""


def changed_for_later(old: DaemonConfig, new: DaemonConfig) -> tuple[str, ...]:
    """The keys and tables that differ and take effect at the next start."""
    changed = (name for name in FIXED_KEYS if getattr(old, name) != getattr(new, name))
    return tuple(dict.fromkeys(FIXED_KEYS[name] for name in changed))
