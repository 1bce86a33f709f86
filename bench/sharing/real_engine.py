"""Whether all requests together pay what their worker works (`engine_seconds`)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ..engine_seconds import CONCURRENCY, REQUESTS, rounds
from .figures import ROOT, figure, finish, parser_of
from .real_place import tell
from support.verdict import EXIT_CODES, Verdict

CLAIM = "engine_seconds"
SHORT, FULL = 2, 5


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_engine", __doc__)
    parser.add_argument("--samples", type=int, default=0, help="rounds")
    given = parser.parse_args()
    count = given.samples or (SHORT if given.short else FULL)
    if not Path("/proc/self/task").is_dir():
        print(f"not measured: {CLAIM}: the states of threads are read from /proc", flush=True)
        return EXIT_CODES[Verdict.NOT_SHOWN]
    found = asyncio.run(rounds(ROOT / "models" / "smollm2", count))
    for paid_s, busy_s in found:
        tell(f"{paid_s:.2f} engine seconds of {busy_s:.2f} busy ones")
    note = f"{REQUESTS} requests in a round, {CONCURRENCY} at a time, SmolLM2"
    off = [abs(paid_s / busy_s - 1) for paid_s, busy_s in found]
    return finish([figure(CLAIM, off, note=note)], is_kept=given.keep)


if __name__ == "__main__":
    sys.exit(main())
