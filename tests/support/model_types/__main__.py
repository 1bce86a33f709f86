"""`make models`: tries every model type and writes the table of docs/models.md.

python -m support.model_types            every type, writes the table
python -m support.model_types gemma3n    these types only, writes nothing
"""

from __future__ import annotations

import sys
import time

from .configs_a_to_k import MODEL_TYPES_A_TO_K
from .configs_l_to_z import MODEL_TYPES_L_TO_Z
from .run import try_model_type


def main(names: list[str]) -> None:
    for model_type in MODEL_TYPES_A_TO_K + MODEL_TYPES_L_TO_Z:
        if names and model_type.name not in names:
            continue
        started = time.monotonic()
        r = try_model_type(model_type)
        cells = " | ".join(f"{v}{list(v.cached) or ''}" for v in r.verdicts.values())
        took_s = time.monotonic() - started
        print(
            f"{r.name} | {r.caches} | {r.load} | {r.batching} | {cells} | {took_s:.1f}", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
