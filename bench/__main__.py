"""`python -m bench [NAME …] [--repeats N] [--base COMMIT]`, or `python -m bench traffic -h`.

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
ONLY_BY_NAME = ("against",)
"""It needs `--base`."""


def main() -> None:
    """Run the named benchmarks one after the other; by default, all that need no option."""
    from . import (
        adapters,
        against,
        commands,
        drafts,
        embeddings,
        engine_seconds,
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
            "engine_seconds": lambda repeats: engine_seconds.run(SMOLLM2, repeats),
            "drafts": drafts.run,
            "embeddings": embeddings.run,
            "adapters": adapters.run,
            "group": group.run,
            "commands": lambda repeats: commands.run(),
            "sharing": lambda repeats: sharing.run(20 * repeats),
            "against": lambda repeats: against.run(given.base, repeats),
        }
        parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
        parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(runs))
        parser.add_argument("--repeats", type=int, default=5)
        parser.add_argument("--base", help="for `against`: a commit, or the folder of a tree")
        given = parser.parse_args()
        if unknown := sorted(set(given.names) - set(runs)):
            parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(runs)}")
        if "against" in given.names and not given.base:
            parser.error("`against` needs --base")
        print("\n".join(machine_lines()) + "\n", flush=True)
        for name in given.names or [name for name in runs if name not in ONLY_BY_NAME]:
            runs[name](given.repeats)


if __name__ == "__main__":
    main()
