"""Mutations of a GGUF file, and what the converter makes of many of them."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 0xDEADBEEF, 2**40)

BATCH = """
import os, shutil, sys
from pathlib import Path
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.gguf import convert
target = Path(sys.argv[1])
for line in sys.stdin:
    print("begin", line.strip(), flush=True)
    try:
        convert(Path(line.strip()), target, lambda _: None)
        outcome = "converted"
    except BadModelError as error:
        outcome = f"refused {error}"
    except BaseException as error:
        outcome = f"bare {type(error).__name__}: {error}"
    left = sorted(path.name for path in target.parent.iterdir())
    if left != ([target.name] if outcome == "converted" else []):
        outcome = f"bare it left {left}"
    shutil.rmtree(target, ignore_errors=True)
    print(outcome.replace("\\n", " "), flush=True)
"""
"""Converts each file that it is told of, one after the other."""


def mutations(content: bytes, count: int, seed: int, within: int) -> Iterator[bytes]:
    """Yield changed copies: single bytes, whole numbers and cuts.

    Args:
        content: of the file.
        count: how many.
        seed: the same one gives the same copies.
        within: only so many bytes at its begin are changed.
    """
    drawn = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        match drawn.choice(["bytes", "bytes", "number32", "number64", "cut", "several"]):
            case "bytes":
                changed[drawn.randrange(within)] = drawn.randrange(256)
            case "several":
                for _ in range(drawn.randrange(2, 8)):
                    changed[drawn.randrange(within)] = drawn.randrange(256)
            case "number32":
                number = drawn.choice(EXTREMES) % 2**32
                struct.pack_into("<I", changed, drawn.randrange(within - 4), number)
            case "number64":
                number = drawn.choice(EXTREMES)
                struct.pack_into("<Q", changed, drawn.randrange(within - 8), number)
            case "cut":
                del changed[drawn.randrange(len(changed) if drawn.random() < 0.3 else within) :]
        yield bytes(changed)


def outcomes(files: list[Path], target: Path) -> dict[Path, str]:
    """Convert files in as few processes as live long enough.

    Returns:
        For each file `converted`, `refused` with the sentence, `bare` with what was raised or left
        behind, or `died` with how the process ended.
    """
    found: dict[Path, str] = {}
    left = list(files)
    while left:
        done = subprocess.run(
            [sys.executable, "-c", BATCH, os.fspath(target)],
            input="".join(f"{path}\n" for path in left),
            capture_output=True,
            text=True,
            errors="replace",
        )
        lines = [line for line in done.stdout.split("\n") if line]
        said = [line for line in lines if not line.startswith("begin ")]
        found |= dict(zip(left, said, strict=False))
        if len(said) < len(left):
            found[left[len(said)]] = f"died {done.returncode} {done.stderr[-300:]}"
        left = left[len(said) + 1 :]
    return found
