"""What sharing costs: a step before and after it, and a dispatch from short and long lines."""

from __future__ import annotations

from ..compare import REPEATS, interleaved, tree_of
from ..dispatch import dispatch_us, growth
from ..handle_cost import BEFORE_SHARING, CHILD, added, print_cost
from .curves import save
from .figures import figure, finish, parser_of

FEW = 3


def main() -> int:
    """Measures both."""
    parser = parser_of("cost", __doc__)
    parser.add_argument("--base", default=BEFORE_SHARING, help="a commit, or the folder of a tree")
    given = parser.parse_args()
    repeats = FEW if given.short else REPEATS
    with tree_of(given.base) as base:
        before, now = interleaved(base, repeats, CHILD)
    print_cost(before, now)
    ends = dispatch_us(repeats)
    grown = growth(ends)
    figures = [figure(f"handle_{rows}", parts) for rows, parts in added(before, now).items()]
    figures += [figure(f"dispatch_{waiting}", times) for waiting, times in grown.items()]
    save("cost", {"before": before, "now": now, "dispatch": ends})
    return finish(figures, is_kept=given.keep)


if __name__ == "__main__":
    raise SystemExit(main())
