"""Prints lines, files, words and bytes of the checkout, by part: `python tools/size.py`."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")
COLUMNS = ("files", "lines", "words", "bytes")


def part_of(path: Path) -> str:
    """Return the part that a file belongs to."""
    first = path.parts[0]
    if path.suffix == ".md":
        return "documents" if first == "docs" else "other documents"
    known = {**dict.fromkeys(PRODUCT, "product"), "bench": "bench, tools", "tools": "bench, tools"}
    return known.get(first, "tests" if first == "tests" else "other")


def main() -> None:
    """Prints a row for each part."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * len(COLUMNS))
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = ROOT / name
        data = b"" if file.is_symlink() or not file.is_file() else file.read_bytes()
        counted = (1, data.count(b"\n"), len(data.split()), len(data))
        for row in (part_of(Path(name)), "all"):
            sums[row] = [old + new for old, new in zip(sums[row], counted, strict=True)]
    print(f"{'':<16}", *(f"{column:>10}" for column in COLUMNS))
    for row, values in sorted(sums.items(), key=lambda one: one[1][-1]):
        print(f"{row:<16}", *(f"{value:>10,}" for value in values))


if __name__ == "__main__":
    main()
