"""What a worker that a test makes is launched with."""

from __future__ import annotations

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSpec

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///tmp/x.sock",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)
