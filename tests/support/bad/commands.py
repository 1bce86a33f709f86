"""What a person can type wrong, with the exit code and the sentence that it gets, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from support.bad.input import LONE_SURROGATE, MODEL, SMALL, SMALL_CONTEXT


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
    BadCommand(arguments=("htop",), status=64, words="No such command 'htop'"),
    BadCommand(arguments=("top", "--interval", "0"), status=64,
               words="'0' is not between 0.1s and 1h"),
    BadCommand(arguments=("status", "--watch", "--check"), status=64,
               words="use either --watch or --check"),
    BadCommand(arguments=("wait", "nobody"), status=1, words="no model is called 'nobody'"),
    BadCommand(arguments=("why", "nobody"), status=1,
               words="neither a model nor a request that is known is called 'nobody'"),
    BadCommand(arguments=("why", MODEL, "--report", "/nowhere/r.tar.gz"), status=1,
               words="cannot write /nowhere/r.tar.gz: No such file"),
    BadCommand(arguments=("why", MODEL, "--report", os.devnull), status=64,
               words="there is a file at /dev/null already"),
    BadCommand(arguments=("wait", MODEL, "--timeout", "soon"), status=64,
               words="'soon' is not a duration"),
    BadCommand(arguments=("generate", MODEL), status=64, words="Missing argument 'PROMPT'"),
    BadCommand(arguments=("generate", MODEL, "hi", "--colour"), status=64, words="No such option"),
    BadCommand(arguments=("generate", MODEL, "hi", "--max-tokens", "many"), status=64,
               words="'many' is not a valid integer"),
    BadCommand(arguments=("generate", MODEL, "hi", "--max-tokens", "0"), status=64,
               words="--max-tokens takes an integer from 1"),
    BadCommand(arguments=("generate", MODEL, "hi", "--temperature", "11"), status=64,
               words="--temperature takes a number from 0 to 10"),
    BadCommand(arguments=("generate", MODEL, "hi", "--temperature", "nan"), status=64,
               words="--temperature takes a number from 0 to 10"),
    BadCommand(arguments=("generate", MODEL, "hi", "--timeout", "-1"), status=64,
               words="'-1' is not a duration"),
    BadCommand(arguments=("generate", MODEL, "hi", "--priority", "urgent"), status=64,
               words="'urgent' is not one of 'interactive', 'normal', 'batch'"),
    BadCommand(arguments=("generate", MODEL, "hi", "--top-k", "-1"), status=64,
               words="--top-k takes an integer from 0"),
    BadCommand(arguments=("generate", MODEL, "hi", "--min-p", "2"), status=64,
               words="--min-p takes a number from 0 to 1"),
    BadCommand(arguments=("generate", MODEL, "hi", "--schema", "/nowhere/schema.json"), status=64,
               words="cannot read /nowhere/schema.json: No such file"),
    BadCommand(arguments=("generate", MODEL, "hi", "--schema", os.devnull), status=64,
               words="is not JSON"),
    BadCommand(arguments=("generate", MODEL, "hi", "--raw", "--think"), status=64,
               words="--raw sends no system prompt and knows no --think"),
    BadCommand(arguments=("generate", MODEL, "hi", "--system", ""), status=64,
               words="--system takes at least one character"),
    BadCommand(arguments=("generate", "hi"), status=64, words="name a model; configured: "),
    BadCommand(arguments=("generate",), status=64, words="Missing argument 'PROMPT'"),
    BadCommand(arguments=("chat", "--seed", "1"), status=64, words="name a model; configured: "),
    BadCommand(arguments=("chat", MODEL, "--top-p", "7"), status=64,
               words="--top-p takes a number above 0 and up to 1"),
    BadCommand(arguments=("bench", "nobody"), status=1, words="no model is called 'nobody'"),
    BadCommand(arguments=("bench", MODEL, "--prompt-tokens", "16,0"), status=64,
               words="'16,0' is not a list of numbers from 1 on"),
    BadCommand(arguments=("bench", SMALL, "--prompt-tokens", str(SMALL_CONTEXT)), status=1,
               words=f"is {SMALL_CONTEXT} tokens"),
    BadCommand(arguments=("bench", MODEL, "--concurrency", "5000"), status=1,
               words="requests at once, not 5000"),
    BadCommand(arguments=("bench", MODEL, "--compare", os.devnull), status=64,
               words="is no run of `mlxsup bench`"),
    BadCommand(arguments=("bench", MODEL, "--output", os.devnull), status=64, words="exists"),
    BadCommand(arguments=("bench", MODEL, "--fail-if-slower", "5"), status=64,
               words="--fail-if-slower needs --compare"),
    BadCommand(arguments=("bench", MODEL, "--through", "http"), status=1,
               words="the daemon serves no HTTP"),
    BadCommand(arguments=("generate", MODEL, ""), status=64, words="at least one character"),
    BadCommand(arguments=("generate", MODEL, "hi" + LONE_SURROGATE), status=64,
               words="encoded as UTF-8, not lone surrogates"),
    BadCommand(arguments=("generate", MODEL, "-"), standard_input=b"hi\xff", status=64,
               words="the prompt on stdin is not UTF-8: invalid start byte at byte 2"),
    BadCommand(arguments=("generate", MODEL, "-"), status=64, words="at least one character"),
    BadCommand(arguments=("generate", "smal", "hi"), status=1, words="did you mean small?"),
    BadCommand(arguments=("load", "nobody"), status=1, words="no model is called 'nobody'"),
    BadCommand(arguments=("load", MODEL, "--keep-alive", "0"), status=64,
               words="a load takes seconds above 0, or -1 for ever"),
    BadCommand(arguments=("load", MODEL, "--context-length", "-1"), status=64,
               words="-1 is not in the range 0<=x<=2147483647"),
    BadCommand(arguments=("load", MODEL, "--keep-alive", "soon"), status=64,
               words="'soon' is not a duration"),
    BadCommand(arguments=("load", ""), status=1, words="model takes text of 1 to 128 characters"),
    BadCommand(arguments=("prioritize", "nobody", "batch"), status=1,
               words="no open request has the id 'nobody'"),
    BadCommand(arguments=("attach", "nobody"), status=1,
               words="no open request has the id 'nobody'"),
    BadCommand(arguments=("cancel", "nobody"), status=1,
               words="no open request has the id 'nobody'"),
    BadCommand(arguments=("prioritize", "nobody", "urgent"), status=64,
               words="'urgent' is not one of"),
    BadCommand(arguments=("log-level", "loud"), status=64, words="'loud' is not one of"),
    BadCommand(arguments=("connect", "emacs"), status=64, words="'emacs' is not one of"),
    BadCommand(arguments=("connect", "zed"), status=1, words="the daemon serves no HTTP"),
    BadCommand(arguments=("doctor", MODEL), status=64, words="unexpected extra argument"),
    BadCommand(arguments=("key", "new", "my laptop"), status=64,
               words="a name takes 1 to 64 of the characters"),
    BadCommand(arguments=("key", "revoke", "nobody"), status=1,
               words="no key is called 'nobody'"),
    BadCommand(arguments=("service", "instal"), status=64, words="No such command 'instal'"),
    BadCommand(arguments=("generate", SMALL, "y" * SMALL_CONTEXT), status=1,
               words=f"the context of {SMALL_CONTEXT} leaves no room"),
)  # fmt: skip
"""What a person can type wrong; each also with --json."""
