"""Each command of both clients: what reaches the daemon, and that its answer comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import AsyncClient, Client
from mlxsup.protocol.client_messages import (
    Load,
    Ping,
    Prioritize,
    Reload,
    Restart,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.log_level import ChangeLogLevel
from mlxsup.protocol.message import Message
from mlxsup.protocol.request_messages import (
    CancelRequest,
    PauseRequest,
    RequestsQuery,
    ResumeRequest,
)
from mlxsup.protocol.states import Priority

from support.scripted_supervisor import Peer, answer, scripted_supervisor

ID = RequestId("some")
REQUEST = RequestId("#12")
MODEL = ModelName("m")

COMMANDS: list[tuple[str, list[str], dict[str, Any], Message]] = [
    ("ping", [], {}, Ping(id=ID)),
    ("status", [], {"debug": True}, StatusQuery(id=ID, debug=True)),
    ("load", ["m"], {"dry_run": True, "keep_alive": 9, "context_length": 512},
     Load(id=ID, model=MODEL, dry_run=True, keep_alive=9.0, context_length=512)),
    ("unload", ["m"], {}, Unload(id=ID, model=MODEL)),
    ("restart", ["m"], {"now": True}, Restart(id=ID, model=MODEL, now=True)),
    ("prioritize", ["#12", "batch"], {},
     Prioritize(id=ID, request=REQUEST, priority=Priority.BATCH)),
    ("pause", ["#12"], {}, PauseRequest(id=ID, request=REQUEST)),
    ("resume", ["#12"], {}, ResumeRequest(id=ID, request=REQUEST)),
    ("reload", [], {"dry_run": True}, Reload(id=ID, dry_run=True)),
    ("stop", [], {"now": True, "timeout_s": 3}, Stop(id=ID, now=True, timeout_s=3.0)),
    ("requests", [], {"client": "me"}, RequestsQuery(id=ID, client="me")),
    ("cancel", ["#12"], {}, CancelRequest(id=ID, request=REQUEST)),
    ("log_level", ["debug"], {}, ChangeLogLevel(id=ID, level="debug")),
]  # fmt: skip


def reply(peer: Peer, message: Message) -> None:
    """A script: an answer that nothing else could have made."""
    answer(peer, message, said="so", state="READY")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("name", "given", "options", "message"), COMMANDS)
def test_a_command_reaches_the_daemon_and_its_answer_comes_back(
    path: Path, name: str, given: list[str], options: dict[str, Any], message: Any, is_async: bool
) -> None:
    async def ask(endpoint: str) -> Any:
        async with AsyncClient(endpoint) as client:
            return await getattr(client, name)(*given, **options)

    with scripted_supervisor(path, reply) as supervisor:
        if is_async:
            value = asyncio.run(ask(supervisor.endpoint))
        else:
            with Client(supervisor.endpoint) as client:
                value = getattr(client, name)(*given, **options)
        (got,) = supervisor.got(type(message))
    assert value == {"said": "so", "state": "READY"}
    assert replace(got, id=ID) == message
