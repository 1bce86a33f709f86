"""`python -m bench [NAME …] [--repeats N]`: the named benchmarks, or all that need no name."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the daemon and the tiny model that tests use, too

SMOLLM2 = ROOT / "models" / "smollm2"
KEPT = ROOT / "build"
"""Rows of the fast path and of the HTTP gateway that were measured, a folder for each: they are not
measured again at the same commit."""

NAMES = (
    "fast_path",
    "footprint",
    "control",
    "two_models",
    "burst",
    "long_prompt",
    "second_turn",
    "look_up",
    "readiness",
    "engine_seconds",
    "dispatch",
    "recorder",
    "sampling",
    "commands",
    "model_command",
)
"""What runs if no name is given."""

CLIENTS = "clients"
"""It compares what works, not how fast, and may install programs."""

ONLY_BY_NAME = (CLIENTS, "http")
"""These run only if they are named: `http` takes hours, and starts the servers of others."""


def chosen(given: Sequence[str]) -> argparse.Namespace:
    """What the words of a command line ask for, with the names of what is to run.

    Raises:
        SystemExit: they ask for nothing that there is.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    known, left_out = (*NAMES, *ONLY_BY_NAME), " and ".join(ONLY_BY_NAME)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(known)}; none: all but {left_out}"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--programs",
        action="store_true",
        help="with `clients`: other people's programs instead of packages, installed if need be",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PROGRAM", default=[], help="with --programs: these alone"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=40_000, metavar="N", help="of the long prompt"
    )
    arguments = parser.parse_args(given)
    for name in set(arguments.names).difference(known):
        parser.error(f"no benchmark is called {name!r}; there are {', '.join(known)}")
    if (arguments.programs or arguments.only) and CLIENTS not in arguments.names:
        parser.error(f"--programs and --only are for `{CLIENTS}`: name it")
    arguments.names = arguments.names or list(NAMES)
    return arguments


def main() -> None:
    """Runs them one after the other and prints one report."""
    from . import (
        burst,
        control,
        dispatch,
        engine_seconds,
        footprint,
        long_prompt,
        look_up,
        model_command,
        readiness,
        recorder,
        sampling,
        second_turn,
        two_models,
    )
    from .report import machine_lines
    from support.tiny_model import make_tiny_model

    arguments = chosen(sys.argv[1:])
    print("\n".join(machine_lines()) + "\n", flush=True)
    repeats, tokens = arguments.repeats, arguments.prompt_tokens
    few = min(repeats, 3)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder) / "tiny")
        runs: dict[str, Callable[[], object]] = {
            "fast_path": fast_path,
            "http": http,
            "footprint": lambda: footprint.run(SMOLLM2, max(3, repeats // 2)),
            "control": lambda: control.run(tiny, SMOLLM2, few),
            "two_models": lambda: two_models.run(tiny, SMOLLM2, few),
            "burst": lambda: burst.run(tiny, repeats),
            "long_prompt": lambda: long_prompt.run(Path(folder) / "long", repeats, tokens),
            "second_turn": lambda: second_turn.run(SMOLLM2, Path(folder) / "kinds", few),
            "look_up": lambda: look_up.run(repeats),
            "readiness": lambda: readiness.run(tiny, SMOLLM2, repeats),
            "engine_seconds": lambda: engine_seconds.run(SMOLLM2, repeats),
            "dispatch": lambda: dispatch.run(repeats),
            "recorder": lambda: recorder.run(repeats),
            "sampling": lambda: sampling.run(repeats),
            "commands": commands,
            "model_command": lambda: model_command.run(
                tiny, max(repeats, model_command.LEAST_REPEATS)
            ),
            CLIENTS: lambda: clients(Path(folder) / "known", arguments.programs, arguments.only),
        }
        for name in arguments.names:
            runs[name]()


def fast_path() -> int:
    """What lacks of the fast path on a CPU."""
    from .fast_path.cpu import STAGES
    from .fast_path.document import FAST_PATH
    from .fast_path.stages import main as measure

    return measure(
        STAGES, "bench.fast_path", None, sheet=FAST_PATH, words=[str(KEPT / "fast_path")]
    )


def http() -> int:
    """What lacks of the HTTP gateway's speed."""
    from .fast_path.stages import main as measure
    from .http.document import HTTP
    from .http.stages import STAGES

    return measure(STAGES, "bench.http", None, sheet=HTTP, words=[str(KEPT / "http")])


def commands() -> None:
    """How long commands take to begin."""
    from .commands import run

    run()


def clients(folder: Path, has_programs: bool, only: list[str]) -> None:
    """What packages, or programs, can do with the gateway."""
    if has_programs:
        from .clients.programs.run import run as run_programs

        run_programs(only)
    else:
        from .clients.run import run

        run(folder)


if __name__ == "__main__":
    main()
