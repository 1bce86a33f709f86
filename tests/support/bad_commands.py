"""What a person can type wrong, with the exit code and the sentence that it gets, as data."""

from __future__ import annotations

from dataclasses import dataclass

from .bad_input import LONE_SURROGATE, MODEL, SMALL, SMALL_CONTEXT


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
    BadCommand(arguments=(), status=64, words="a command is missing"),
    BadCommand(arguments=("genrate",), status=64, words="No such command 'genrate'"),
    BadCommand(arguments=("generate", MODEL), status=64, words="Missing argument 'PROMPT'"),
    BadCommand(arguments=("generate", MODEL, "hi", "--colour"), status=64, words="No such option"),
    BadCommand(arguments=("generate", MODEL, "hi", "--max-tokens", "many"), status=64,
               words="'many' is not a valid integer"),
    BadCommand(arguments=("generate", MODEL, "hi", "--max-tokens", "0"), status=1,
               words="max_tokens takes an integer from 1"),
    BadCommand(arguments=("generate", MODEL, "hi", "--temperature", "11"), status=1,
               words="temperature takes a number from 0 to 10"),
    BadCommand(arguments=("generate", MODEL, "hi", "--temperature", "nan"), status=1,
               words="temperature takes a number from 0 to 10"),
    BadCommand(arguments=("generate", MODEL, "hi", "--timeout", "-1"), status=64,
               words="'-1' is not a duration"),
    BadCommand(arguments=("generate", MODEL, "hi", "--priority", "urgent"), status=64,
               words="'urgent' is not one of 'interactive', 'normal', 'batch'"),
    BadCommand(arguments=("generate", MODEL, ""), status=1, words="at least one character"),
    BadCommand(arguments=("generate", MODEL, "hi" + LONE_SURROGATE), status=1,
               words="encoded as UTF-8, not lone surrogates"),
    BadCommand(arguments=("generate", MODEL, "-"), standard_input=b"hi\xff", status=64,
               words="the prompt on stdin is not UTF-8: invalid start byte at byte 2"),
    BadCommand(arguments=("generate", MODEL, "-"), status=1, words="at least one character"),
    BadCommand(arguments=("generate", "smal", "hi"), status=1, words="did you mean small?"),
    BadCommand(arguments=("load", "nobody"), status=1, words="no model is called 'nobody'"),
    BadCommand(arguments=("load", ""), status=1, words="model takes text of 1 to 128 characters"),
    BadCommand(arguments=("prioritize", "nobody", "batch"), status=1,
               words="no open request has the id 'nobody'"),
    BadCommand(arguments=("prioritize", "nobody", "urgent"), status=64,
               words="'urgent' is not one of"),
    BadCommand(arguments=("connect", "emacs"), status=64, words="'emacs' is not one of"),
    BadCommand(arguments=("connect", "zed"), status=1, words="the daemon serves no HTTP"),
    BadCommand(arguments=("key", "new", "my laptop"), status=64,
               words="a name takes 1 to 64 of the characters"),
    BadCommand(arguments=("key", "revoke", "nobody"), status=1,
               words="no key is called 'nobody'"),
    BadCommand(arguments=("generate", SMALL, "y" * SMALL_CONTEXT), status=1,
               words=f"the context of {SMALL_CONTEXT} leaves no room"),
)  # fmt: skip
"""What a person can type wrong; each also with --json."""
