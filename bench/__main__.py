"""`python -m bench [NAME …] [--repeats N]`, or `python -m bench traffic -h`.

Each benchmark measures its sides in one run, interleaved, and prints a table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import ROOT

SMOLLM2 = ROOT / "models" / "smollm2"


def main() -> None:
    """Run the named benchmarks one after the other; by default, all of them."""
    from . import (
        adapters,
        commands,
        drafts,
        embeddings,
        gateway,
        group,
        router,
        sharing,
        traffic,
        two_models,
        warm_pool,
    )
    from .report import machine_lines
    from support.models.tiny_model import make_tiny_model

    if sys.argv[1:2] == ["traffic"]:
        traffic.main(sys.argv[2:])
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder) / "tiny")
        runs: dict[str, Callable[[int], object]] = {
            "traffic": lambda repeats: traffic.main(["burst", "--repeats", str(repeats)]),
            "router": router.run,
            "gateway": gateway.run,
            "two_models": lambda repeats: two_models.run(tiny, SMOLLM2, repeats),
            "warm_pool": lambda repeats: warm_pool.run(SMOLLM2, repeats),
            "drafts": drafts.run,
            "embeddings": embeddings.run,
            "adapters": adapters.run,
            "group": group.run,
            "commands": lambda repeats: commands.run(),
            "sharing": lambda repeats: sharing.run(20 * repeats),
        }
        parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
        parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(runs))
        parser.add_argument("--repeats", type=int, default=5)
        given = parser.parse_args()
        if unknown := sorted(set(given.names) - set(runs)):
            parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(runs)}")
        print("\n".join(machine_lines()) + "\n", flush=True)
        for name in given.names or runs:
            runs[name](given.repeats)


if __name__ == "__main__":
    main()
