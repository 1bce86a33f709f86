"""Known names that may have been meant with an unknown one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def close_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names most like another one, in any case, the likest first."""
    from difflib import get_close_matches  # each command's help would wait for it

    by_lower_case = {one.lower(): one for one in sorted(known)}
    return [by_lower_case[one] for one in get_close_matches(name.lower(), by_lower_case, n=most)]


def did_you_mean(close: Sequence[str]) -> str:
    """Return `did you mean a, b or c?`; empty without any name."""
    if not close:
        return ""
    *others, last = close
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
