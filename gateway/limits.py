"""What the gateway puts up with before it refuses."""

from __future__ import annotations

from mlxsup.protocol import codec

MAX_BODY_BYTES = 48 * 1024 * 1024
"""Of one request: what the daemon takes, with its pictures in base64."""

MAX_TEXT_BYTES = codec.MAX_TEXT_BYTES
"""Of a body besides what may be base64: so the values in it are as few as without pictures."""

MAX_SMALL_BODY_BYTES = 32 * 1024
"""A longer body is read in a converter. One of this length takes the event loop up to 9 ms of CPU
(1,200 blocks of text), one of 256 KiB took 68."""

MAX_ITEMS = 10_000
"""Messages, items of an input, or parts of a message."""

MAX_TOOLS = 1024

MAX_TEMPLATE_BYTES = 64 * 1024
"""Of `chat_template_kwargs`, packed: they are options, and every chat template sees them."""

MAX_ECHO_BYTES = 64 * 1024
"""A field that a response would repeat in three of its events is left out there if it is longer."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of the responses that are kept for those that continue them."""

LEAST_KEPT_BYTES = 16 * 1024
"""The least that a kept response counts: so there are at most 4,096."""

KEPT_ITEM_BYTES = 256
"""The memory of an item of a kept response besides its text."""

MAX_ASKED_BYTES = 2 * codec.MAX_BODY_BYTES
"""What one HTTP request may ask of the daemon: with `n`, its body counts that many times."""

MAX_HELD_BYTES = 128 * 1024 * 1024
"""Of bodies that are too long for the event loop and are not converted yet."""

MAX_WAITING_BODIES = 64
"""Bodies that wait for a converter."""

MAX_CONVERTERS = 2
CONVERT_LIMIT_S = 30
"""How long a converter may take for one body: twenty times what the worst one takes."""

CONVERTER_MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of a converter; 8 MiB of `[]` take 0.3 GiB."""

CONVERTER_IDLE_S = 300.0
"""How long a converter without work is kept: its next body starts at once."""

BODY_LIMIT_S = 30.0
"""From the end of a request's head to the end of its body."""

DISCARD_LIMIT_S = 6.0
"""How long the rest of a refused body is read, so that its sender gets to see the refusal."""

MAX_DISCARD_BYTES = 2 * MAX_BODY_BYTES
"""How much of it is read."""

MAX_HEAD_BYTES = 64 * 1024
HEAD_LIMIT_S = 10.0
"""From the connection, or the first byte of a further request, to the end of its head."""

MAX_HEADER_CHARACTERS = 1024
"""Of a header that names things: nginx takes a head of 4 KiB, aiohttp a line of 8."""

MAX_PIPELINED = 64
"""Requests of one connection that wait for their answers; with one more it is cut."""

IDLE_LIMIT_S = 60.0
"""How long a connection may stay open without a request."""

UNREAD_LIMIT_S = 60.0
"""How long somebody may leave unread what was sent; then the connection is cut."""

MAX_CHOICES = 16
"""Answers to one HTTP request: `n` for each prompt."""

MAX_PROMPT_LOGPROBS = 2**20
"""Tokens of prompts, and of the likeliest in their places, in the answers to one HTTP request: 120
MiB. A prompt of 32,768 tokens with 20 others at each place has 688,108."""

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

REPEAT_COMMENT_S = 15.0
"""How long a waiting stream is silent if nothing changes: nginx cuts after a minute, Node's `fetch`
after five, and the HTML standard advises a comment every 15 seconds."""

STATUS_LIMIT_S = 3.5
"""How long the daemon may take to say which models there are."""

CHANGE_LIMIT_S = 90.0
"""The same for a change of the configuration: it looks for the model, and at what it needs."""

END_LIMIT_S = 2.0
"""How long open answers may take when the gateway is asked to end."""

ORPHAN_LIMIT_S = 3.0
"""How long it may take to end by itself once the supervisor has died."""
