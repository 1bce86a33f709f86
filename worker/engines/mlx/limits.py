"""What one worker may take of the machine's memory; set at the load, set back at the close (E3).

N workers that each wire what the machine recommends wire more than there is, and hang it (I3), so
nothing is wired unless the launch spec says how much.
"""

from __future__ import annotations

import mlx.core as mx
from mlxsup.protocol.launch import LaunchSpec


class MemoryLimits:
    """The limits of this process.

    Args:
        spec: says what they are.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._memory_before: int | None = None
        self._cache_before: int | None = None
        self._wired_before: int | None = None

    def set(self) -> None:
        """Before the load, so that it is held to them; nothing is wired yet."""
        spec = self._spec
        if spec.memory_limit_bytes is not None:
            self._memory_before = int(mx.set_memory_limit(spec.memory_limit_bytes))
        if spec.cache_limit_bytes is not None:
            self._cache_before = int(mx.set_cache_limit(spec.cache_limit_bytes))
        if _recommended_bytes() is not None:
            self._wired_before = int(mx.set_wired_limit(0))

    def set_wired(self) -> None:
        """After the load, and after BatchGenerator's constructor, which sets its own limit."""
        recommended = _recommended_bytes()
        if recommended is None:
            return
        wanted = self._spec.wired_limit_bytes
        if wanted is None:
            # What is wired for ever is the weights; everything else comes and goes.
            wanted = mx.get_active_memory()
        mx.set_wired_limit(min(wanted, recommended))

    def restore(self) -> None:
        """Everything as it was; after BatchGenerator's `close`, which sets back its own idea."""
        if self._wired_before is not None:
            mx.set_wired_limit(self._wired_before)
        if self._cache_before is not None:
            mx.set_cache_limit(self._cache_before)
        if self._memory_before is not None:
            mx.set_memory_limit(self._memory_before)


def _recommended_bytes() -> int | None:
    """How much may be wired at most; None where the device does not wire."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return None if recommended is None else int(recommended)
