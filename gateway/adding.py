"""Models that requests make the daemon serve: `[gateway] auto_add`, and Ollama's `pull`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from mlxsup.client import ConnectionLost, RequestError
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.store.hub_cache import is_owned_repository

from .daemon import Daemon
from .errors import failure_of
from .failure import bad_field
from .keys import Caller
from .names import LATEST, row_of

LOOK_S = 0.5
"""How often a download is looked at."""

BEFORE_LOAD = (State.STOPPED, State.PENDING, State.BACKOFF)
"""States of a model that may still be downloaded."""

MAX_NAME = 256

HUBS = ("hf.co/", "huggingface.co/")
"""What Ollama's users write before a repository's name."""

logger = logging.getLogger(__name__)


class Adding:
    """Adds models to the daemon, and takes those away again that turn out to be none.

    Attributes:
        is_automatic: whether a request for a model adds it.
    """

    def __init__(self, daemon: Daemon, *, is_automatic: bool) -> None:
        self.is_automatic = is_automatic
        self._daemon = daemon
        # One for each model that was added and whose load has not ended.
        self._trials: dict[str, asyncio.Task[None]] = {}

    def may(self, caller: Caller) -> bool:
        """True if requests of this caller add models: a key may belong to another person, who must
        not fill the disk unless it is an operator's."""
        return self.is_automatic and (caller.is_operator or not caller.has_key)

    async def named(self, name: str, caller: Caller) -> str:
        """Return what the daemon calls a model that a request names, which is added if need be.

        Returns:
            The same name if it stays unknown; the daemon then refuses the request.

        Raises:
            Failure: the daemon does not answer, or cannot write its configuration.
        """
        if not self.may(caller) or not (reference := reference_of(name)):
            return name
        if row_of(await self._daemon.status(), name) is not None:
            return name
        try:
            return await self.add(reference)
        except RequestError as error:
            if error.code is ErrorCode.UNKNOWN_MODEL:
                return name
            raise failure_of(error) from None
        except ConnectionLost as error:
            raise failure_of(error) from None

    async def add(self, name: str) -> str:
        """Add a model and have it loaded; return what the daemon calls it.

        One that is no model, which only its download shows, is removed again.

        Raises:
            RequestError, ConnectionLost: it is not added.
        """
        client = self._daemon.client
        done = await client.add(name)
        model = str(done["model"])
        is_new = model in done["added"]
        if model in self._trials:
            return model
        if is_new or (await client.load(model, dry_run=True))["outcome"] == "downloads":
            self._trials[model] = asyncio.create_task(self._try(model, is_new=is_new))
            self._trials[model].add_done_callback(lambda _: self._trials.pop(model, None))
        return model

    async def _try(self, model: str, *, is_new: bool) -> None:
        """Load a model, and remove it if it is new and cannot be downloaded."""
        client = self._daemon.client
        try:
            try:
                await client.load(model)
            except RequestError as error:
                row = row_of(await client.status(), model)
                is_absent = row is not None and not row["generation"]
                if is_new and is_absent and error.code is ErrorCode.LOAD_FAILED:
                    logger.info("added model is removed again model=%s", model)
                    await client.remove(model)
        except (RequestError, ConnectionLost) as error:
            logger.info("added model not loaded model=%s error=%s", model, error)

    async def pull(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield how far a download has come, in Ollama's form, until the model is on the disk.

        Raises:
            Failure: it is no model that can be had.
        """
        if not (reference := reference_of(name)):
            raise bad_field("model", "model must be OWNER/NAME, or the name of a model found here")
        yield {"status": "pulling manifest"}
        try:
            model = await self.add(reference)
            while (trial := self._trials.get(model)) is not None:
                row = row_of(await self._daemon.status(), model)
                progress = (row or {}).get("progress") or {}
                if row is None or row["state"] not in BEFORE_LOAD:
                    break
                if total := progress.get("total_bytes"):
                    completed = progress["done_bytes"]
                    yield {"status": f"pulling {name}", "total": total, "completed": completed}
                await asyncio.wait([trial], timeout=LOOK_S)
            row = row_of(await self._daemon.status(), model)
        except (RequestError, ConnectionLost) as error:
            raise failure_of(error) from None
        if row is None or row["state"] == "FAILED":
            cause = ((row or {}).get("last_exit") or {}).get("detail") or "it cannot be downloaded"
            yield {"error": f"{name}: {cause}"}
        else:
            yield {"status": "success"}


def reference_of(name: str) -> str:
    """Return OWNER/NAME or the bare name that a request means; empty for paths and addresses, which
    are for the command line."""
    for host in HUBS:
        name = name.removeprefix(host)
    name = name.removesuffix(f":{LATEST}")
    is_bare = "/" not in name and not name.startswith((".", "~"))
    return name if name and len(name) <= MAX_NAME and (is_bare or is_owned_repository(name)) else ""


def line_of(value: Mapping[str, Any]) -> bytes:
    """Return a line of a stream of JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
