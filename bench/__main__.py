"""`python -m bench [NAME …] [--repeats N] [--model FOLDER | --shape NAME] [--base COMMIT]`.

Each benchmark measures its sides in one run, interleaved, and prints a table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the daemon and the tiny model that tests use, too

SMOLLM2 = ROOT / "models" / "smollm2"
ONLY_BY_NAME = ("against",)
"""It needs `--base`."""


def main() -> None:
    """Run the named benchmarks one after the other; by default, all that need no option."""
    from . import (
        against,
        commands,
        control,
        dispatch,
        engine_seconds,
        footprint,
        gateway,
        readiness,
        router,
        sampling,
        second_turn,
        sharing,
        throughput,
        two_models,
        warm_pool,
    )
    from .report import machine_lines
    from .shaped_model import SEVEN_B, SMALL, make_shaped_model
    from support.models.tiny_model import make_tiny_model

    shapes = {"small": SMALL, "7b": SEVEN_B}
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder) / "tiny")

        def model() -> Path:
            if given.shape:
                shape = shapes[given.shape]
                return make_shaped_model(
                    Path(folder) / given.shape, shape, seed=1, context_length=8192
                )
            return Path(given.model or SMOLLM2)

        runs: dict[str, Callable[[int], object]] = {
            "throughput": lambda repeats: throughput.run(model(), repeats),
            "router": router.run,
            "gateway": gateway.run,
            "footprint": lambda repeats: footprint.run(model(), repeats),
            "control": lambda repeats: control.run(tiny, SMOLLM2, repeats),
            "two_models": lambda repeats: two_models.run(tiny, SMOLLM2, repeats),
            "second_turn": lambda repeats: second_turn.run(model(), Path(folder), repeats),
            "readiness": lambda repeats: readiness.run(tiny, model(), repeats),
            "warm_pool": lambda repeats: warm_pool.run(SMOLLM2, repeats),
            "engine_seconds": lambda repeats: engine_seconds.run(model(), repeats),
            "dispatch": dispatch.run,
            "sampling": sampling.run,
            "commands": lambda repeats: commands.run(),
            "sharing": lambda repeats: sharing.run(20 * repeats),
            "against": lambda repeats: against.run(given.base, repeats),
        }
        parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
        parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(runs))
        parser.add_argument("--repeats", type=int, default=5)
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--model", metavar="FOLDER", help="instead of SmolLM2")
        which.add_argument("--shape", choices=shapes, help="random weights of that size instead")
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
