"""What the gateway puts up with before it refuses."""

from __future__ import annotations

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Of one request; twice what the daemon takes, because JSON may be that much longer."""

BODY_LIMIT_S = 30.0
"""From the end of a request's head to the end of its body."""

DISCARD_LIMIT_S = 1.0
"""How long the rest of a refused body is read, so that its sender gets to see the refusal."""

MAX_HEAD_BYTES = 64 * 1024
HEAD_LIMIT_S = 10.0
"""From the connection, or the first byte of a further request, to the end of its head."""

IDLE_LIMIT_S = 60.0
"""How long a connection may stay open without a request."""

UNREAD_LIMIT_S = 60.0
"""How long somebody may leave unread what was sent; then the connection is cut."""

MAX_CHOICES = 16
"""Answers to one HTTP request: `n` for each prompt."""

MAX_FOLLOWERS = 256
"""Who may follow the models at once."""

MAX_CHANGES_BEHIND = 1024
"""Changes that wait for a follower; with one more it is cut off."""

FOLLOW_AGAIN_S = 1.0
"""How long after the daemon was lost its changes are followed again."""

HOLD_S = 5.0
"""How long the head of a streamed answer is held back, so that a refusal can still be a status."""

COMMENT_INTERVAL_S = 1.0
"""A waiting stream gets at most one comment in this time."""

STATUS_LIMIT_S = 3.5
"""How long the daemon may take to say which models there are."""

END_LIMIT_S = 2.0
"""How long open answers may take when the gateway is asked to end."""

ORPHAN_LIMIT_S = 3.0
"""How long it may take to end by itself once the supervisor has died."""
