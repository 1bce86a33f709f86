"""How often a request finds its model loaded, in virtual time: ours, plain LRU, and the optimum.

Twelve models of equal size, a budget for four, requests with a Zipf distribution, one at a time.
"""

from __future__ import annotations

from .curves import save
from .figures import figure, finish, parser_of
from .seeds import over_seeds
from .virtual_order import OURS
from support.hit_rates import REQUESTS, clairvoyant, lru, requests, served

SEEDS = 30
FEW = 5
GAP_S = 5.0
"""From the end of a request to the next one; a load takes a second."""
LRU = "LRU"
OPTIMUM = "who knows the future"


def rates(seed: int) -> dict[str, float]:
    """Hits per request."""
    wanted = requests(seed)
    hits = {
        OURS: served(wanted, GAP_S),
        LRU: lru(wanted),
        OPTIMUM: clairvoyant(wanted),
    }
    return {name: count / REQUESTS for name, count in hits.items()}


def main() -> int:
    """Plays all seeds."""
    given = parser_of("virtual_hits", __doc__).parse_args()
    runs = over_seeds(rates, FEW if given.short else SEEDS)
    found = {name: [run[name] for run in runs] for name in (OURS, LRU, OPTIMUM)}
    figures = [figure("hit_rate", found[OURS], {name: found[name] for name in (LRU, OPTIMUM)})]
    save("hits", found)
    return finish(figures, is_kept=given.keep)


if __name__ == "__main__":
    raise SystemExit(main())
