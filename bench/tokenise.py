"""Tokenises in a separate process, for comparison: jobs on standard input, a line each.

`{"prompt": "…", "times": n}` → `{"tokens": n, "seconds": s}`, the seconds for all times together.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(folder: str) -> None:
    """Serves jobs until standard input ends."""
    from mlxsup.protocol.body import RequestBody
    from mlxsup.worker.engines.mlx.text import load_text

    text = load_text(Path(folder), eos_token_ids=None, vocabulary_size=None)
    for line in sys.stdin:
        job = json.loads(line)
        body = RequestBody(prompt=job["prompt"])
        begin = time.perf_counter()
        counts = [len(text.encode(body).tokens) for _ in range(job["times"])]
        seconds = time.perf_counter() - begin
        print(json.dumps({"tokens": counts[0], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
