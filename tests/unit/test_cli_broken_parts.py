"""What `mlxsup status --check` calls broken."""

from __future__ import annotations

import pytest

from mlxsup.cli.broken_parts import broken_parts
from mlxsup.protocol.states import State


@pytest.mark.parametrize(
    ("state", "says"), [("FAILED", ["m has FAILED"]), ("BACKOFF", ["m is in BACKOFF"])]
)
def test_a_model_that_has_failed_or_waits_for_its_next_attempt_is_broken(
    state: str, says: list[str]
) -> None:
    assert broken_parts({"models": [{"name": "m", "state": state}]}) == says


@pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED, State.BACKOFF}))
def test_no_other_state_is_broken(state: str) -> None:
    assert broken_parts({"models": [{"name": "m", "state": state}]}) == []


@pytest.mark.parametrize("state", ["frozen", "backoff", "crash loop"])
def test_a_gateway_that_crashes_is_broken(state: str) -> None:
    status = {"models": [], "gateway": {"state": state}}
    assert broken_parts(status) == ["the HTTP gateway is down"]


@pytest.mark.parametrize("gateway", [None, {"state": "ready"}, {"state": "starting"}])
def test_a_gateway_that_is_off_or_runs_is_not(gateway: dict[str, str] | None) -> None:
    assert broken_parts({"models": [], "gateway": gateway}) == []
