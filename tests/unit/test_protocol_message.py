"""What all messages have in common."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Load, Unload
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.version import PROTOCOL_VERSION

ONE = Unload(id=RequestId("r"), model=ModelName("m"))


def test_messages_are_equal_by_their_fields_and_their_type() -> None:
    assert Unload(id=RequestId("r"), model=ModelName("m")) == ONE
    assert Unload(id=RequestId("x"), model=ModelName("m")) != ONE
    assert Unload(id=RequestId("r"), model=ModelName("x")) != ONE
    assert Load(id=RequestId("r"), model=ModelName("m")) != ONE
    assert ONE != "r"


def test_a_message_prints_as_the_call_that_makes_it() -> None:
    assert repr(ONE) == f"Unload(id='r', model='m', v={PROTOCOL_VERSION})"


def test_a_message_has_its_fields_and_no_others() -> None:
    message: Any = ONE
    with pytest.raises(AttributeError):
        message.other = 1
