"""Twelve equal models, memory for four, and requests by a Zipf distribution (`hit_rate_real`).

One client asks one request after the other. Whether a model is loaded when it is asked is looked up
just before. The same list of requests goes through plain LRU and through a cache that knows the
future, which is the best that any order of evictions can do.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient

from .figures import Figure, figure, finish, parser_of
from .real_budget import BudgetWatch, with_kept
from .real_place import leaving_out, prompt_tokens, row_of, squeezed, tell
from support.tiny_model import make_tiny_model

CLAIM = "hit_rate_real"
MODELS = 12
ROOM = 4
BUDGET = 4.5
"""In models: a process that holds a little more than is reserved for it must not cost a place."""

MIN_RESIDENCY_S = 3.0
GAP_S = 0.2
PROMPT, ANSWER = 16, 16
MINUTES, SHORT_MINUTES = 10.0, 2.5
PARTS = 5
"""The range comes from leaving out each of this many parts of the run."""


def zipf(count: int, seed: int) -> list[str]:
    """Whom each request is for: the first model twice as often as the second, and so on."""
    names = [f"m{number}" for number in range(MODELS)]
    weights = [1 / rank for rank in range(1, MODELS + 1)]
    return random.Random(seed).choices(names, weights=weights, k=count)


def lru(wanted: Sequence[str]) -> list[bool]:
    """Which requests a cache hits that drops the least recently used."""
    loaded: list[str] = []
    hits = []
    for model in wanted:
        hits.append(model in loaded)
        if model in loaded:
            loaded.remove(model)
        elif len(loaded) == ROOM:
            loaded.pop(0)
        loaded.append(model)
    return hits


def clairvoyant(wanted: Sequence[str]) -> list[bool]:
    """The same for one that drops the model whose next request is farthest away: the optimum."""
    loaded: set[str] = set()
    hits = []
    for place, model in enumerate(wanted):
        rest = wanted[place + 1 :]
        hits.append(model in loaded)
        if model not in loaded and len(loaded) == ROOM:
            away = {one: rest.index(one) if one in rest else len(wanted) for one in loaded}
            loaded.remove(max(sorted(away), key=away.__getitem__))
        loaded.add(model)
    return hits


@dataclass(slots=True)
class Asked:
    """One request after the other.

    Attributes:
        wanted: whom they were for.
        hits: whether that model was READY.
        took_s: how long each took.
    """

    wanted: list[str] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


async def ask_until(client: AsyncClient, end_s: float, seed: int) -> Asked:
    """Asks one after the other until that time of `time.perf_counter`."""
    asked = Asked()
    for number, model in enumerate(zipf(100_000, seed)):
        begin = time.perf_counter()
        if begin > end_s:
            break
        row = await row_of(client, model)
        await client.complete(
            model, prompt_tokens=prompt_tokens(PROMPT, number), max_tokens=ANSWER, ignore_eos=True
        )
        asked.wanted.append(model)
        asked.hits.append(row["state"] == "READY")
        asked.took_s.append(time.perf_counter() - begin)
        if number % 20 == 0:
            tell(f"{number} requests, {sum(asked.hits)} hits")
        await asyncio.sleep(GAP_S)
    return asked


async def measure(folders: Mapping[str, Path], seconds: float) -> tuple[Asked, BudgetWatch]:
    """One run."""
    keys = {"min_residency_s": MIN_RESIDENCY_S}
    with squeezed(folders, BUDGET, entry={"max_concurrency": 1}, supervisor=keys) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            with BudgetWatch(daemon.endpoint) as watch:
                asked = await ask_until(client, time.perf_counter() + seconds, seed=1)
    return asked, watch


def rate_and_range(hits: Sequence[bool]) -> list[float]:
    """The rate of hits of all requests, and, around it, with each part of the run left out."""
    size = -(-len(hits) // PARTS)
    parts = [hits[begin : begin + size] for begin in range(0, len(hits), size)]

    def rate(some: Sequence[Sequence[bool]]) -> float:
        return sum(map(sum, some)) / sum(map(len, some))

    whole = rate(parts)
    around = leaving_out(parts, rate)
    return [min([whole, *around]), whole, max([whole, *around])]


def figures_of(asked: Asked, watch: BudgetWatch, minutes: float) -> list[Figure]:
    """The rate next to those of the two other caches."""
    caches: dict[str, Callable[[Sequence[str]], list[bool]]] = {
        "LRU": lru,
        "who knows the future": clairvoyant,
    }
    by_hit = {
        is_hit: [s for s, hit in zip(asked.took_s, asked.hits, strict=True) if hit is is_hit]
        for is_hit in (True, False)
    }
    times = ", ".join(
        f"a {'hit' if is_hit else 'miss'} took {percentile(took_s, 50):.2f} s"
        for is_hit, took_s in by_hit.items()
        if took_s
    )
    return [
        figure(
            CLAIM,
            rate_and_range(asked.hits),
            {name: rate_and_range(of(asked.wanted)) for name, of in caches.items()},
            runs=len(asked.wanted),
            note=f"{minutes:g} minutes; median: {times}",
        ),
        *watch.figures("requests for twelve models"),
    ]


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_zipf", __doc__)
    parser.add_argument("--minutes", type=float, default=0.0)
    given = parser.parse_args()
    minutes = given.minutes or (SHORT_MINUTES if given.short else MINUTES)
    with tempfile.TemporaryDirectory(prefix="mlxsup-zipf-") as folder:
        folders = {
            f"m{number}": make_tiny_model(Path(folder) / f"m{number}", seed=number)
            for number in range(MODELS)
        }
        asked, watch = asyncio.run(measure(folders, 60 * minutes))
    return finish(with_kept(figures_of(asked, watch, minutes)), is_kept=given.keep)


if __name__ == "__main__":
    sys.exit(main())
