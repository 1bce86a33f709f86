"""What faults of the fake engine can reach in its worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What faults of a worker need besides the engine.

    Attributes:
        send_frames: sends the supervisor frames as they are.
        drop_link: closes the connection to the supervisor for good.
        end_beats: ends the heartbeats.
    """

    send_frames: Callable[[list[bytes]], None]
    drop_link: Callable[[], None]
    end_beats: Callable[[], None]
