"""Search the hub: a process of its own asks it and is ended at a time limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.download import (
    DownloadFailed,
    DownloadProblem,
    DownloadSpec,
    FoundRepository,
    RepositoriesFound,
    download_argv,
    read_report,
)

LIMIT_S = 30.0
"""For the hub, and for starting the process that asks it."""

MOST_ANSWER_BYTES = 1024 * 1024
"""Of that process: a hub may say anything."""


@dataclass
class SearchError(Exception):
    """A search without an answer.

    Attributes:
        code: a `DownloadProblem`, or `internal`.
        message: one sentence without a full stop.
        hint: what helps; may be empty.
    """

    code: str
    message: str
    hint: str = ""


async def find_repositories(words: str) -> list[FoundRepository]:
    """Return the repositories with models in MLX's format that the hub finds.

    The process has ended when this returns or is cancelled.

    Raises:
        SearchError: the hub cannot be asked.
    """
    process = await asyncio.create_subprocess_exec(
        *download_argv(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=MOST_ANSWER_BYTES,
    )
    noise = ""
    try:
        async with asyncio.timeout(LIMIT_S):
            assert process.stdin is not None
            assert process.stdout is not None
            spec = DownloadSpec(words=words)
            process.stdin.write(to_line(spec))
            with suppress(ConnectionError):  # it has ended at once, and may have said why
                await process.stdin.drain()
            async for line in process.stdout:
                match read_report(line):
                    case RepositoriesFound(found=found):
                        return found
                    case DownloadFailed(message=message, hint=hint, problem=problem):
                        raise SearchError(problem.value, message, hint)
                    case _:
                        noise = line.decode(errors="replace").strip() or noise
    except TimeoutError:
        hint = "check the network, then search again"
        raise SearchError(DownloadProblem.NETWORK, "the hub does not answer", hint) from None
    except ValueError:  # too much
        pass
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise SearchError("internal", "the search has failed", noise)
