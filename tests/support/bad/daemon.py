"""A stream beside bad input, which must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxsup.client import Client
from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.bad.input import MODEL
from support.client.streams import Reader
from support.daemon.daemon import Daemon
from support.eventually import eventually

LIVE_PROMPT = "the stream that must not change"


@contextmanager
def undisturbed(daemon: Daemon) -> Iterator[Reader]:
    """A stream that runs all through a block, and is compared with the undisturbed answer."""
    with daemon.client() as client:
        before = facts(client)
        reader = Reader(client, MODEL, LIVE_PROMPT).started()
        yield reader
        seen = len(reader.tokens)
        eventually(lambda: len(reader.tokens) > seen or reader.error, what="the stream continues")
        assert reader.error is None
        reader.stream.cancel()
        result = reader.finished()
        assert result.finish_reason is FinishReason.CANCELLED
        expected = answer_tokens(encode_text(LIVE_PROMPT), len(reader.tokens))
        assert reader.tokens == expected, "the stream beside it changed"
        eventually(lambda: facts(client) == before, what="nothing is left, nothing was restarted")


def facts(client: Client) -> dict[str, Any]:
    """Return all that no bad input may change: models, processes and open requests."""
    status = client.status()
    kept = ("name", "state", "wanted", "generation", "pid", "restarts", "running", "queued")
    rows = [{key: model[key] for key in kept} for model in status["models"]]
    gateway = status["gateway"] and status["gateway"]["pid"]
    return {"pid": status["pid"], "gateway": gateway, "queue": status["queue"], "models": rows}
