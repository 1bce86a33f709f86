"""How much of the machine's memory one worker may take; set at the load, restored at the end (E3).

N workers that each wire what the machine recommends wire more than there is, and hang it (I3), so
nothing is wired unless the launch spec says how much.

On a GPU MLX keeps nearly the whole device for reuse in each process, mostly arrays that caches
have outgrown, so the default bound is 8 GiB or an eighth of the device. With CUDA a memory limit
makes MLX wait for queued work: without it a prompt of 32,768 tokens took 81 GiB, with it 36.
"""

from __future__ import annotations

import mlx.core as mx

from mlxsup.protocol.launch import LaunchSpec

from ...engine import EngineBytes

MOST_CACHE_BYTES = 8 * 2**30
CACHE_SHARE = 8
"""How much a worker on a GPU keeps for reuse by default: one such part of the device, or the size
above if that is less. MLX's own limit there is nearly the whole device, in each process."""

OVERSHOOT_SHARE = 8
"""Such a part of what rows may take is left for what MLX allocates before it looks at its limit."""


class MemoryLimits:
    """The limits of this process.

    Args:
        spec: contains them.
        backend: `cpu`, `cuda` or `metal`.
    """

    def __init__(self, spec: LaunchSpec, backend: str) -> None:
        self._spec = spec
        self._backend = backend
        self._memory_before: int | None = None
        self._cache_before: int | None = None
        self._wired_before: int | None = None
        self._weight_bytes = 0
        self._most_bytes: int | None = None

    def set(self) -> None:
        """Sets the limits before the load, so that they apply to it; nothing is wired yet."""
        spec = self._spec
        if spec.memory_limit_bytes is not None:
            self._memory_before = int(mx.set_memory_limit(spec.memory_limit_bytes))
        cache_limit_bytes = spec.cache_limit_bytes
        if cache_limit_bytes is None and self._backend != "cpu":
            cache_limit_bytes = _default_cache_bytes()
        if cache_limit_bytes is not None:
            self._cache_before = int(mx.set_cache_limit(cache_limit_bytes))

    def set_wired(self) -> None:
        """Sets the wired limit after the load, if the spec has one: MLX wires nothing unasked."""
        self._weight_bytes = mx.get_active_memory()
        recommended = _recommended_bytes()
        wanted = self._spec.wired_limit_bytes
        if recommended is None or wanted == 0:
            return
        if wanted is None:
            # The weights are what stays wired; everything else comes and goes.
            wanted = self._weight_bytes
        self._wired_before = int(mx.set_wired_limit(min(wanted, recommended)))

    def bound_rows(self, rows_bytes: int) -> None:
        """Limits what MLX holds to the weights and most of what rows may take; with CUDA only.

        MLX runs ahead of the device and holds what all passes under way compute: several times what
        remains of a long prompt. At its limit it waits for them, which costs nothing measurable.
        """
        if self._backend != "cuda":
            return
        most = self._weight_bytes + rows_bytes - rows_bytes // OVERSHOOT_SHARE
        if self._spec.memory_limit_bytes is not None:
            most = min(most, self._spec.memory_limit_bytes)
        self._most_bytes = most
        before = int(mx.set_memory_limit(most))
        if self._memory_before is None:
            self._memory_before = before

    def is_exceeded(self) -> bool:
        """True if arrays hold more than `bound_rows` allows, as prefixes and long rows may
        together: then MLX takes three times as long for everything."""
        return self._most_bytes is not None and mx.get_active_memory() > self._most_bytes

    def restore(self) -> None:
        """Restores everything."""
        if self._wired_before is not None:
            mx.set_wired_limit(self._wired_before)
        if self._cache_before is not None:
            mx.set_cache_limit(self._cache_before)
        if self._memory_before is not None:
            mx.set_memory_limit(self._memory_before)


def clear_cache() -> None:
    """Give back what MLX keeps for reuse.

    On CPUs MLX first waits for what was sent, and nothing else of this process runs meanwhile: in a
    group, whose passes wait for other hosts, a rank would look dead.
    """
    if mx.default_device() == mx.cpu:
        mx.synchronize()
    mx.clear_cache()


def bytes_held(kept: int, prefix: int) -> EngineBytes:
    """Return the memory as MLX counts it.

    Args:
        kept: see `EngineBytes`.
        prefix: likewise.
    """
    return EngineBytes(
        active=mx.get_active_memory(),
        cache=mx.get_cache_memory(),
        peak=mx.get_peak_memory(),
        kept=kept,
        prefix=prefix,
    )


def _default_cache_bytes() -> int:
    """Return the bytes that a worker on a GPU keeps for reuse if its entry does not say."""
    info = mx.device_info()
    device_bytes = info.get("total_memory") or info.get("memory_size")  # CUDA, Metal
    if not device_bytes:
        return MOST_CACHE_BYTES
    return min(MOST_CACHE_BYTES, int(device_bytes) // CACHE_SHARE)


def _recommended_bytes() -> int | None:
    """Return the bytes that may be wired at most; None if the device does not wire memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return None if recommended is None else int(recommended)
