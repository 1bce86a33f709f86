"""Answers that a command cuts off say how many tokens were sent, whether they run or are paused."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Stop
from mlxsup.protocol.ids import RequestId

from support.core_driver import Driver


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_answers_that_are_cut_off_say_what_was_sent(how: str) -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask("runs")
    driver.ask("reads")
    driver.accept(1)
    driver.token(1)
    driver.token(1)
    if how == "stop":
        driver.say(Stop(id=RequestId("s"), now=True))
    else:
        driver.unload()
        driver.pass_time(10.0)
    code = "shutting_down" if how == "stop" else "unloaded"
    errors = {id: driver.failure_of(id).error for id in ("runs", "reads")}
    assert {error["code"] for error in errors.values()} == {code}
    assert errors["runs"]["detail"]["tokens_sent"] == 2
    assert "tokens_sent" not in errors["reads"].get("detail", {}), "it had not begun"
