"""What a daemon, or a look at its models, shows to be wrong about a command line, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from support.bad.input import MODEL, SMALL, SMALL_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCommand:
    """A command line that cannot be carried out.

    Attributes:
        arguments: without those that name the daemon.
        standard_input: what the command can read there.
        status: the exit code.
        words: stand in what is written to standard error.
    """

    arguments: tuple[str, ...]
    status: int
    words: str
    standard_input: bytes = b""


COMMANDS = (
    BadCommand(arguments=("wait", "nobody"), status=1, words="there is no model 'nobody'"),
    BadCommand(arguments=("why", "nobody"), status=1,
               words="there is no model or request 'nobody'; models: "),
    BadCommand(arguments=("why", "smal"), status=1, words="did you mean small?"),
    BadCommand(arguments=("why", MODEL, "--report", "/nowhere/r.tar.gz"), status=1,
               words="cannot write /nowhere/r.tar.gz: No such file"),
    BadCommand(arguments=("why", MODEL, "--report", os.devnull), status=64,
               words="/dev/null already exists"),
    BadCommand(arguments=("generate", MODEL), status=64, words="Missing argument 'PROMPT'"),
    BadCommand(arguments=("generate", "hi"), status=64, words="name a model: "),
    BadCommand(arguments=("chat", "--seed", "1"), status=64, words="name a model: "),
    BadCommand(arguments=("bench", "nobody"), status=1, words="there is no model 'nobody'"),
    BadCommand(arguments=("bench", SMALL, "--prompt-tokens", str(SMALL_CONTEXT)), status=1,
               words=f"do not fit into the {SMALL_CONTEXT} tokens"),
    BadCommand(arguments=("bench", MODEL, "--concurrency", "5000"), status=1,
               words="requests at once, but you asked for 5000"),
    BadCommand(arguments=("generate", MODEL, "-"), standard_input=b"hi\xff", status=64,
               words="the prompt on stdin is not UTF-8: invalid start byte at byte 2"),
    BadCommand(arguments=("generate", MODEL, "-"), status=64, words="at least one character"),
    BadCommand(arguments=("generate", "smal", "hi"), status=1, words="did you mean small?"),
    BadCommand(arguments=("load", "nobody"), status=1, words="there is no model 'nobody'"),
    BadCommand(arguments=("load", ""), status=1, words="there is no model ''"),
    BadCommand(arguments=("prioritize", "nobody", "batch"), status=1,
               words="no open request has the id or number 'nobody'"),
    BadCommand(arguments=("attach", "nobody"), status=1,
               words="no open request has the id or number 'nobody'"),
    BadCommand(arguments=("cancel", "nobody"), status=1,
               words="no open request has the id or number 'nobody'"),
    BadCommand(arguments=("connect", "zed"), status=1, words="the daemon runs without HTTP"),
    BadCommand(arguments=("key", "revoke", "nobody"), status=1,
               words="there is no key named 'nobody'"),
    BadCommand(arguments=("generate", SMALL, "y" * SMALL_CONTEXT), status=1,
               words=f"the context of {SMALL_CONTEXT} leaves no room"),
)  # fmt: skip
"""Each is also run with --json; unit/test_cli_commands.py has those that need no daemon."""
