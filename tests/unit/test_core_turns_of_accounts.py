"""Turns of suspects whose client may run no more elsewhere: others need not wait for them."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings, RestartSettings

from support.core_driver import LAUNCH, Driver, entry


def test_a_limit_that_a_client_reaches_elsewhere_calls_its_suspects_turn_off() -> None:
    clients = {"ann": ClientSettings(max_running=1), "bob": ClientSettings()}
    limits = CoreSettings(max_queue=99, max_queue_per_client=9, clients=clients)
    launch = replace(LAUNCH, max_concurrency=4)
    restart = RestartSettings(backoff_initial_s=0.1, backoff_max_s=0.1)
    driver = Driver([entry(name, launch=launch, restart=restart) for name in ("m", "n")], limits)
    for name in ("m", "n"):
        driver.load(name)
        driver.come_up(name)

    [suspect] = driver.serve("suspect", client="ann")
    driver.accept(suspect)
    driver.exit(signal="SIGSEGV")
    driver.come_up()
    driver.accept(suspect)
    driver.exit(signal="SIGSEGV")
    driver.pass_time(0.2)  # of its back-off
    [first] = driver.serve("first", model="n", client="ann")
    driver.come_up()
    assert driver.dispatched() == [], "its client may run one request, which runs elsewhere"
    assert driver.row()["on_probation"] == 1

    assert driver.serve("new", client="bob") == [3]
    driver.accept(first, "n")
    driver.token(first, model="n", finish=FinishReason.STOP)
    assert driver.serve("waits", client="bob", resume=False) == [], "the turn is due"
    assert driver.row()["running"] == ["new"]

    driver.serve("second", model="n", client="ann")
    assert driver.row("n")["running"] == ["second"]
    assert driver.row()["running"] == ["new", "waits"]
