"""What is installed: versions, and the back-end of MLX."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ..facts import Software
from ..finding import Finding, note, ok, problem

SUBJECT = "software"


def check_software(facts: Software) -> Iterator[Finding]:
    """Judges the versions of packages, and whether MLX can use what the machine has."""
    wrong = [package for package in facts.packages if not package.is_right]
    for package in wrong:
        has = "is not installed" if package.version is None else f"is {package.version}"
        yield problem(
            SUBJECT,
            f"{package.name} {has}; mlxsup needs {package.name}{package.needed}",
            why="mlxsup was not tested with it: loads may fail, and answers may differ",
            command=f"{facts.installer} {shlex.quote(package.name + package.needed)}",
        )
    if facts.system == "Linux" and not facts.has_backend:
        yield problem(
            SUBJECT,
            "MLX has no back-end: neither that for CPUs nor that for CUDA is installed",
            why="no model can be loaded",
            command=f"{facts.installer} 'mlxsup[{'cuda' if facts.has_gpu else 'cpu'}]'",
        )
    elif facts.has_gpu and facts.backend == "cpu":
        yield note(
            SUBJECT,
            "this machine has an NVIDIA GPU, and MLX is installed for the CPU",
            why="models run many times slower than they could",
            command=f"{facts.installer} 'mlxsup[cuda]'",
        )
    if not facts.packages:
        yield note(
            SUBJECT,
            "mlxsup is not installed as a package, so nothing says which versions it needs",
            why="MLX of another version may be in use",
            fix="install mlxsup with pip, pipx or uv",
        )
    elif not wrong:
        shown = [p for p in facts.packages if p.name in ("mlx", "mlx-lm")]
        versions = "".join(f", {p.name} {p.version}" for p in shown)
        yield ok(
            SUBJECT, f"mlxsup {facts.version}, Python {facts.python}{versions} ({facts.backend})"
        )
