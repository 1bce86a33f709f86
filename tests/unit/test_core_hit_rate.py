"""How often a request finds its model loaded, next to plain LRU and to who knows the future.

Twelve models of equal size, room for four, requests for them with a Zipf distribution: the real
core in virtual time, with played workers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from mlxsup.protocol.states import State

from support.core_memory import MemoryDriver, limited, sized

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
MODELS = "abcdefghijkl"
ROOM = 4
REQUESTS = 600


def requests(seed: int) -> list[str]:
    """Whom each request is for: the first model twice as often as the second, and so on."""
    weights = [1 / rank for rank in range(1, len(MODELS) + 1)]
    return random.Random(seed).choices(MODELS, weights=weights, k=REQUESTS)


def lru(wanted: Sequence[str]) -> int:
    """Hits of a cache that drops the least recently used."""
    loaded: list[str] = []
    hits = 0
    for model in wanted:
        if model in loaded:
            hits += 1
            loaded.remove(model)
        elif len(loaded) == ROOM:
            loaded.pop(0)
        loaded.append(model)
    return hits


def clairvoyant(wanted: Sequence[str]) -> int:
    """Hits of a cache that drops the model whose next request is farthest away: the optimum."""
    loaded: set[str] = set()
    hits = 0
    for place, model in enumerate(wanted):
        rest = wanted[place + 1 :]
        if model in loaded:
            hits += 1
        elif len(loaded) == ROOM:
            away = {one: rest.index(one) if one in rest else REQUESTS for one in loaded}
            loaded.remove(max(sorted(away), key=away.__getitem__))
        loaded.add(model)
    return hits


def served(wanted: Sequence[str], gap_s: float) -> int:
    """Hits of the core: requests one at a time, each this long after the last one's end."""
    driver = MemoryDriver([sized(name, 1) for name in MODELS], limited(ROOM))
    driver.is_checked = False
    hits = 0
    for number, model in enumerate(wanted):
        hits += driver.state(model) is State.READY
        driver.ask(f"r{number}", model)
        while driver.state(model) is not State.READY:
            for victim in MODELS:
                if driver.state(victim) is State.STOPPING:
                    driver.exit(victim, code=0)
            if driver.state(model) is State.LOADING:
                driver.come_up(model)
            else:
                driver.pass_time(0.5)
        driver.row_ends(model, number + 1)
        driver.pass_time(gap_s)
    return hits


def test_in_haste_it_hits_nearly_as_often_as_lru_and_no_more_than_possible() -> None:
    """A model that was just used stays for a while: sometimes another goes than with LRU."""
    wanted = requests(1)
    hits, of_lru, possible = served(wanted, 0.25), lru(wanted), clairvoyant(wanted)
    assert 0.95 * of_lru <= hits <= possible, (hits, of_lru, possible)


def test_the_page_says_how_often() -> None:
    wanted = requests(1)
    ours, of_lru, possible = served(wanted, 5.0), lru(wanted), clairvoyant(wanted)
    said = f"{ours / REQUESTS:.0%} of the requests find their model loaded"
    others = f"{of_lru / REQUESTS:.0%} with plain LRU, {possible / REQUESTS:.0%} for who knows"
    page = " ".join(PAGE.read_text().split())
    assert (said in page, others in page) == (True, True), (said, others)
