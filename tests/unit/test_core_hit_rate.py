"""How often a request finds its model loaded, next to plain LRU and to who knows the future.

Twelve models of equal size, room for four, requests for them with a Zipf distribution: the real
core in virtual time, with played workers.
"""

from __future__ import annotations

from pathlib import Path

from support.hit_rates import REQUESTS, clairvoyant, lru, requests, served

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_in_haste_it_hits_nearly_as_often_as_lru_and_no_more_than_possible() -> None:
    """A model that was just used stays for a while: sometimes another goes than with LRU."""
    wanted = requests(1)
    hits, of_lru, possible = served(wanted, 0.25), lru(wanted), clairvoyant(wanted)
    assert 0.95 * of_lru <= hits <= possible, (hits, of_lru, possible)


def test_the_page_says_how_often() -> None:
    wanted = requests(1)
    ours, of_lru, possible = served(wanted, 5.0), lru(wanted), clairvoyant(wanted)
    said = f"{ours / REQUESTS:.0%} of the requests find their model loaded"
    others = (
        f"Plain LRU would reach {of_lru / REQUESTS:.0%},"
        f" and an oracle that knows the future {possible / REQUESTS:.0%}"
    )
    page = " ".join(PAGE.read_text().split())
    assert (said in page, others in page) == (True, True), (said, others)
