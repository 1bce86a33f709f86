"""Settings of every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A shared machine may be slow for a second, and the first run builds its character tables: neither
# says anything about the code. What a test draws and asserts stays the same.
settings.register_profile("mlxsup", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mlxsup")
