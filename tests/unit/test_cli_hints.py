"""What the command line advises after errors of the daemon."""

from __future__ import annotations

import pytest

from mlxsup.cli.connection import explain_request_error
from mlxsup.client import RequestError
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.supervisor.core import errors
from mlxsup.supervisor.core.requests.ledger import Ledger
from mlxsup.supervisor.core.requests.naming import find_named
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Terms

M, ID = ModelName("m"), RequestId("r1")


def nobodys_name() -> RemoteError:
    """The error of a name that no request has."""
    with pytest.raises(RemoteError) as caught:
        find_named(Ledger(Terms(CoreSettings())), ID)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        errors.already_paused(M, ID),
        errors.not_paused(M, ID),
        errors.may_not_be_paused(M, ID, "m is `deterministic`"),
        nobodys_name(),
    ],
    ids=["paused", "not paused", "may not", "unknown"],
)
def test_a_pause_or_resume_that_is_refused_says_where_to_look(error: RemoteError) -> None:
    explained = explain_request_error(RequestError.of(error))
    assert explained.hint == "see what runs, waits or is paused with `mlxsup requests`"
