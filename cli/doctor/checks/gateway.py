"""The HTTP gateway: whether it can run, and who could reach it."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import GatewayFacts
from ..finding import Finding, ok, problem

SUBJECT = "gateway"


def check_gateway(facts: GatewayFacts) -> Iterator[Finding]:
    """Judges the address, the packages and the keys of a gateway; nothing without one."""
    if not facts.address:
        return
    found = [*_found(facts)]
    yield from found
    if not found:
        here = "listens at" if facts.is_ours else "can listen at"
        yield ok(SUBJECT, f"{here} {facts.address}")


def _found(facts: GatewayFacts) -> Iterator[Finding]:
    if facts.missing:
        yield problem(
            SUBJECT,
            f"{', '.join(facts.missing)} {'is' if len(facts.missing) == 1 else 'are'} not"
            " installed",
            why="`mlxsup start` exits with 78",
            command=f"{facts.installer} 'mlxsup[gateway]'",
        )
    if facts.key_need:
        yield problem(
            SUBJECT,
            f"{facts.key_need}, and there is no key",
            why="strangers could use your models, so `mlxsup start` exits with 78",
            command="mlxsup key new laptop",
        )
    if facts.refusal and not facts.is_ours:
        by = f" by {facts.taken_by}" if facts.taken_by else ""
        what = "is taken" + by if facts.free_address else f"cannot be used: {facts.refusal}"
        yield problem(
            SUBJECT,
            f"{facts.address} {what}",
            why="the gateway cannot listen, and tries again and again",
            fix=f'set listen = "{facts.free_address or "127.0.0.1:8484"}" in [gateway], or end'
            " that program",
        )
