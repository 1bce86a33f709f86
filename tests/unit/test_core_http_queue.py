"""How many requests may wait that come over HTTP without a key: one process, many clients."""

from __future__ import annotations

from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Account, Terms, process_name

SETTINGS = CoreSettings(max_queue=100, max_queue_per_client=10)


def most_waiting(settings: CoreSettings, gateway_pid: int | None, account: str) -> int:
    terms = Terms(settings)
    terms.gateway_pid = gateway_pid
    return terms.most_waiting(Account(account), settings)


def test_gateway_is_a_door_and_leaves_room_for_another_client() -> None:
    gateway = process_name(7, 99)
    assert most_waiting(SETTINGS, 7, gateway) == 90
    assert most_waiting(SETTINGS, 7, process_name(77, 99)) == 10
    assert most_waiting(SETTINGS, 8, gateway) == 10
    assert most_waiting(SETTINGS, None, gateway) == 10


def test_client_with_a_table_keeps_its_own_limit() -> None:
    named = CoreSettings(max_queue=100, clients={"bob": ClientSettings(max_queue=3)})
    assert most_waiting(named, 7, "bob") == 3


def test_small_queue_still_has_the_places_of_one_client() -> None:
    small = CoreSettings(max_queue=12, max_queue_per_client=10)
    assert most_waiting(small, 7, process_name(7, 99)) == 10
