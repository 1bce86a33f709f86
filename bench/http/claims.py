"""What the HTTP gateway's speed claims: rows in order of importance, each measured as one."""

from __future__ import annotations

from ..claim import Claim
from ..fast_path.claims import CPU, FAKE, Row, one

STREAMS = (1, 4, 16, 64)
LEAST = {("tiny", 1): 0.75, ("tiny", 16): 0.90}
"""Tokens per second, to those in one process, of models and streams that have a target."""

NAMES = {"tiny": "tiny model", "smollm2": "SmolLM2"}


def answered(model: str, streams: int) -> Row:
    """A burst over HTTP, next to the same burst in one process and from other servers."""
    row = f"http_{model}_{streams}"
    what = f"{NAMES[model]}, {'one stream' if streams == 1 else f'{streams} streams'} over HTTP:"
    first = "first token" if streams == 1 else "first token, median of the burst"
    return Row(
        name=row,
        claims=(
            Claim(
                id=row, on=CPU, limit=LEAST.get((model, streams)), is_least=True,
                what=f"{what} tokens per second of the whole run, to those in one process",
            ),
            Claim(id=f"{row}_first", on=CPU, what=f"{what} {first}, to that in one process"),
        ),
    )  # fmt: skip


ROWS = {
    row.name: row
    for row in (
        one(
            "http_cpu", on=FAKE, limit=60.0, unit="µs", digits=1,
            what="gateway CPU per chunk, 16 unpaced streams",
        ),
        Row(
            name="http_paced",
            claims=(
                Claim(
                    id="http_paced", on=FAKE, limit=100.0, unit="µs", digits=1,
                    what="gateway CPU per chunk, one stream at 200 steps per second, more than that"
                    " of a bare asyncio forwarder",
                ),
                Claim(
                    id="http_paced_uvloop", on=FAKE, unit="µs", digits=1,
                    what="the same, more than that of the forwarder on uvloop, on which the gateway"
                    " runs",
                ),
            ),
        ),
        answered("tiny", 1),
        answered("tiny", 16),
        answered("tiny", 4),
        answered("tiny", 64),
        one(
            "http_burst", on=CPU, limit=1.25,
            what="tiny model, four clients ask again when they have their answer, 16 times in all:"
            " the slowest first token to the median one",
        ),
        Row(
            name="http_beside",
            claims=(
                Claim(
                    id="http_beside", on=CPU, limit=100, is_worst=True, unit="ms", digits=0,
                    what="the tiny model streams over HTTP while SmolLM2 reads a prompt: the"
                    " largest gap",
                ),
                Claim(
                    id="http_beside_first", on=CPU, limit=2.0,
                    what="first token of a new request to the tiny model meanwhile, to that alone",
                ),
            ),
        ),
        *(answered("smollm2", streams) for streams in STREAMS),
    )
}  # fmt: skip
