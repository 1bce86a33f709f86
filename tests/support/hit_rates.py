"""Twelve models of equal size, room for four, and requests for them with a Zipf distribution.

How often a model is loaded when a request for it comes: with the core in virtual time, with plain
LRU, and for who knows the future.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mlxsup.protocol.states import State

from .core_memory import MemoryDriver, limited, sized

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

    def state(model: str) -> State:  # cheaper than to ask for the whole status
        return driver.model(model).life.state

    for number, model in enumerate(wanted):
        hits += state(model) is State.READY
        driver.ask(f"r{number}", model)
        while state(model) is not State.READY:
            for victim in MODELS:
                if state(victim) is State.STOPPING:
                    driver.exit(victim, code=0)
            if state(model) is State.LOADING:
                driver.come_up(model)
            else:
                driver.pass_time(0.5)
        driver.row_ends(model, number + 1)
        driver.pass_time(gap_s)
    return hits
