"""When a client takes the daemon for gone because it hears nothing, and when it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client.errors import ConnectionLost
from mlxsup.client.session import DOUBT_S, SILENCE_LIMIT_S
from mlxsup.protocol.clock import PULSE_S

from support.played_router import Router


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    yield made
    made.connection.close()
    made.connection.terminate()
    made.context.destroy(linger=0)


def test_silence_ends_everything_once_it_has_lasted_P2(router: Router) -> None:
    box = router.command()
    router.next()
    assert router.connection.delay_s == PULSE_S
    router.pass_time(SILENCE_LIMIT_S)
    assert box.items == []
    assert router.connection.delay_s == pytest.approx(DOUBT_S)
    router.pass_time(DOUBT_S)
    [error] = box.items
    assert isinstance(error, ConnectionLost)
    assert str(error) == f"the daemon at {router.endpoint} has fallen silent"
    assert (error.endpoint, error.is_turned_away) == (router.endpoint, False)
    assert router.links == [(False, True), (True, False)]
    assert router.connection.delay_s is None


def test_a_daemon_that_lacks_the_cpu_is_waited_for_P32(router: Router) -> None:
    box = router.command()
    router.next()
    router.is_busy = True
    router.pass_time(3 * SILENCE_LIMIT_S)
    assert box.items == []
    router.is_busy = False
    router.pass_time(DOUBT_S + PULSE_S)
    assert [type(item) for item in box.items] == [ConnectionLost]


@pytest.mark.parametrize("stall_s", [1.5, SILENCE_LIMIT_S + 0.1, SILENCE_LIMIT_S + DOUBT_S, 3600.0])
def test_while_this_process_stood_still_the_daemon_owed_nothing_P7(
    stall_s: float, router: Router
) -> None:
    """A daemon that stood still, too, may need more than a moment to be heard again."""
    box = router.command()
    router.next()
    router.now += stall_s
    router.connection.pump()
    router.pass_time(SILENCE_LIMIT_S - PULSE_S)
    assert box.items == []
    router.pass_time(DOUBT_S)
    assert [type(item) for item in box.items] == [ConnectionLost]
