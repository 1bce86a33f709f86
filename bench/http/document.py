"""The table of the HTTP gateway in docs/benchmarks.md, from docs/http.json."""

from __future__ import annotations

from ..claim import Place
from ..fast_path.document import DOCUMENT, ROOT, Sheet
from .claims import ROWS

HTTP = Sheet(
    rows=ROWS,
    path=ROOT / "docs" / "http.json",
    place=Place(
        document=DOCUMENT,
        begin="<!-- the HTTP gateway: written by `python -m bench.http FOLDER --keep` -->",
        end="<!-- end of the HTTP gateway -->",
    ),
)
