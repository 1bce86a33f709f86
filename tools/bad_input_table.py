"""Prints docs/bad-input.md from the cases that tests/integration/test_bad_input.py proves.

Run it as `python tools/bad_input_table.py > docs/bad-input.md`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.bad_bodies import BODIES, CLIENT_ONLY
from support.bad_commands import COMMANDS
from support.bad_http import REQUESTS
from support.bad_learned import LEARNED
from support.bad_memory import MEMORY
from support.bad_messages import RAW, UNANSWERED
from support.bad_models import MODELS

INTRODUCTION = """\
# Bad input

Everything that can be wrong with a message to mlxsup, and the error that it gets. This page is
printed by `tools/bad_input_table.py` from the cases of `tests/support/bad_*.py`;
`tests/integration/test_bad_input.py` sends each of them to a real daemon while a stream runs on the
same model, and checks that the error is the one below, that exactly one answer comes, and that the
stream continues with the tokens that it would have had. Another test does the same with 2,000
random and mutated messages.

The daemon keeps what it can read of a wrong message: its answer carries the `id` of the message, or
an empty one if the id could not be read (*id* below: "no"). None of these errors is `retryable`:
the same message would fail again. Logs contain the code of a refused request, and none of its text.
"""

CLIENT = """\
## The Python client

Every body above whose parameters `generate` has is also tried through the Python client, and
raises `RequestError` with the same code and message. What can be checked without the model is
checked before anything is sent, with the worker's code, and raised by the call itself. So are
these, all `invalid_request`:
"""

HTTP = """\
## HTTP

`tests/integration/test_bad_http.py` sends each of these to a real [gateway](gateway.md). A body
that never ends is refused with 413, and senders that dawdle are cut off
([limits](gateway.md#what-it-puts-up-with)).
"""

COMMAND_LINE = """\
## The command line

One sentence on standard error, nothing on standard output, never a traceback. With `--json` the
same as an object with `code`, `message` and `hint`, and the same exit code.
"""

BAD_MODELS = """\
## Models

What is wrong with a model's folder or its entry. With an exit code: one attempt, FAILED, one
sentence, and a hint that says how to continue. What a model that serves says is a warning: `load`,
`start`, `status --debug` and the log show it. `tests/integration/test_bad_models.py` loads each of
them; faults of files that are missing, cut short or unreadable are in [faults.md](faults.md).
"""

BAD_MEMORY = """\
## Memory

`tests/integration/test_bad_memory.py` provokes each of these; a daemon that runs serves on.
"""

BAD_LEARNED = """\
## What earlier workers have kept

In `<runtime_dir>/learned/MODEL`. `tests/integration/test_bad_learned.py` and
`tests/mlx/test_warm_up.py` provoke each of these; the model is loaded and serves, and what is
wrong is said once in its log.
"""

CLOSED = """\
## What gets no answer

What carries no message cannot be answered with one. Nobody else notices.
"""


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = []
    for cells in (titles, ["---"] * len(titles), *rows):
        escaped = [cell.replace("|", r"\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |\n")
    return "".join(lines)


def page() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for title, cases in RAW.items():
        rows = [
            (case.name, f"`{case.code}`", f"… {case.words} …", "yes" if case.id else "no")
            for case in cases
        ]
        parts.append(
            f"## {title}\n\n" + table(("what is sent", "code", "its message says", "id"), rows)
        )
    assert any(case.is_known_to_client for case in BODIES)
    parts.append(
        CLIENT
        + "\n"
        + table(
            ("what is given", "its message says"),
            [(case.name, f"… {case.words} …") for case in CLIENT_ONLY],
        )
    )
    parts.append(http_section())
    parts.append(
        COMMAND_LINE
        + "\n"
        + table(
            ("command", "exit code", "it says"),
            [
                (_command(case.arguments, case.standard_input), str(case.status), case.words)
                for case in COMMANDS
            ],
        )
    )
    parts.append(
        BAD_MODELS
        + "\n"
        + table(
            ("what is wrong", "what follows", "it says"),
            [
                (
                    case.name,
                    f"exit code {case.code}" if case.code else "it serves",
                    f"… {case.words} …" if case.words else "nothing",
                )
                for case in MODELS
            ],
        )
    )
    for introduction, found in ((BAD_MEMORY, MEMORY), (BAD_LEARNED, LEARNED)):
        lines = [(case.name, case.follows, f"… {case.words} …") for case in found]
        parts.append(
            introduction + "\n" + table(("what is wrong", "what follows", "it says"), lines)
        )
    parts.append(CLOSED + "\n" + table(("what is sent", "what happens"), UNANSWERED))
    return "\n".join(parts)


def http_section() -> str:
    """What the gateway refuses."""
    rows = [(case.name, str(case.status), f"… {case.words} …") for case in REQUESTS]
    return f"{HTTP}\n{table(('what is sent', 'status', 'its message says'), rows)}"


def _command(arguments: Sequence[str], standard_input: bytes) -> str:
    """A command line as it is typed, shortened where a word is long."""
    words = ["mlxsup"]
    for argument in arguments:
        shown = os.fsencode(argument).decode(errors="backslashreplace")
        words.append(f"{shown[:3]}…" if len(shown) > 20 else shown or '""')
    if "-" not in arguments:
        return f"`{' '.join(words)}`"
    return f"`printf '{standard_input.decode(errors='backslashreplace')}' | {' '.join(words)}`"


if __name__ == "__main__":
    print(page(), end="")
