"""What paused requests take of what is limited: no place in the queue, but bytes."""

from __future__ import annotations

from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.requests.ledger import PAUSED_BYTES
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver


def limit_of(driver: Driver, id: str) -> str:
    """The setting for which a request was refused."""
    limit: str = driver.failure_of(id).error["detail"]["limit"]
    return limit


def waiting(driver: Driver) -> int:
    """How many wait, as the status says."""
    count: int = driver.core.status(driver.now)["queue"]["waiting"]
    return count


def test_a_request_that_has_not_begun_gives_its_place_to_another_one() -> None:
    driver = Driver(settings=CoreSettings(max_queue=1, max_queue_per_client=1))
    driver.ask()
    driver.pause()
    assert waiting(driver) == 0
    driver.ask("r2")
    assert waiting(driver) == 1
    driver.ask("r3")
    assert limit_of(driver, "r3") == "max_queue"


def test_a_resume_is_not_refused_because_the_queue_is_full() -> None:
    driver = Driver(settings=CoreSettings(max_queue=1, max_queue_per_client=1))
    driver.ask()
    driver.pause()
    driver.ask("r2")
    driver.resume()
    assert waiting(driver) == driver.row()["queued"] == 2
    driver.ask("r3")
    assert limit_of(driver, "r3") == "max_queue"


def test_an_answer_that_has_begun_takes_no_place_either_paused_or_resumed() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask()
    driver.accept(1)
    driver.pause()
    driver.row_left(1)
    assert waiting(driver) == 0
    driver.resume()
    assert waiting(driver) == 0
    driver.token(1, finish=FinishReason.STOP)
    assert driver.core.ledger.held_bytes == 0


def test_pausing_is_no_way_to_have_any_number_of_requests_open() -> None:
    settings = CoreSettings(max_queue=1, max_queue_bytes=2 * PAUSED_BYTES)
    driver = Driver(settings=settings)
    for id in ("r1", "r2"):
        driver.ask(id, body=b"")
        driver.pause(id)
    driver.ask("r3", body=b"1")
    assert limit_of(driver, "r3") == "max_queue_bytes"
    driver.resume()
    assert driver.core.ledger.held_bytes == PAUSED_BYTES
    driver.cancel("r2")
    assert driver.core.ledger.held_bytes == 0
