"""Requests through the client library."""

from __future__ import annotations

from mlxsup.client import AsyncClient, ConnectionLost, RequestError, Result

from .asks import End, Open
from .ledger import Ledger


class LibraryDoor:
    """One `AsyncClient`.

    Args:
        endpoint: of the daemon.
        ledger: where ends are entered.
    """

    name = "library"

    def __init__(self, endpoint: str, ledger: Ledger) -> None:
        self._client = AsyncClient(endpoint)
        self._ledger = ledger

    async def ask(self, one: Open) -> End | None:
        """Sends a request and returns how it ended; None if the connection did."""
        ask = one.ask
        stream = self._client.generate(ask.model, **ask.parameters(), **ask.limits())
        one.id = stream.request_id
        try:
            while True:
                if one.is_due_for_cancel:
                    one.cancel()
                    stream.cancel()
                delta = await anext(stream, None)
                if delta is None:
                    break
                one.take(delta.token_ids, delta.text)
        except RequestError as error:
            end = End(code=error.code.value, is_error=True, detail=error.detail)
        except ConnectionLost as error:
            self._ledger.lost(one, error.message)
            return None
        else:
            end = self._read(one, stream.result)
        self._ledger.ended(one, end, self.name)
        return end

    def _read(self, one: Open, result: Result) -> End:
        """The end as the result tells it, whose text and tokens must be those of the pieces."""
        if (result.token_ids, result.text) != (one.tokens, one.text):
            self._ledger.violate("result", f"{one.ask.number}: not what its pieces were")
        return End(
            code=result.finish_reason.value,
            usage=(result.usage.prompt_tokens, result.usage.completion_tokens),
            seed=result.seed,
            resumed=result.resumed,
            paused=result.paused,
        )

    async def fence(self) -> None:
        """Returns when the daemon has answered a ping."""
        await self._client.ping()

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()
