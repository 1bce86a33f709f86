"""The entry point: it finds the command, and turns every error into a sentence and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from mlxsup.protocol.version import VERSION

from .command_table import (
    ALIASES,
    COMMANDS,
    GROUPS,
    OPTION_HABITS,
    OTHER_WAYS,
    expand,
    guess,
    load,
)
from .exit_status import CliError, ExitStatus
from .terminal.output import Output, discard, terminal_size
from .terminal.writer import guard_streams

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

TRACEBACK_VARIABLE = "MLXSUP_TRACEBACK"
PROGRAM = "mlxsup"
COMPLETE_VARIABLE = "_MLXSUP_COMPLETE"
"""Set by click's scripts when a shell asks for completions."""


NO_THREAD = "can't start new thread"
NO_HOME = "Could not determine home directory."
"""The messages of two of CPython's RuntimeErrors, which have no class of their own."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names in the order in which users need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name."""
        if cmd_name not in COMMANDS:
            return None
        command = load(cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a group after the other, one line for each command; none is imported."""
        others = {meant: other for other, (meant, *more) in ALIASES.items() if not more}
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                words = (f"{name}, {others[name]}" if name in others else name for name in group)
                padded = (f"{one:{width}}" for one in words)
                formatter.write_dl(list(zip(padded, group.values(), strict=True)))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, none of which is imported, and the options."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=what)
            for name, what in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        # Not that of the group, which asks every command what it does.
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name=PROGRAM, message="%(prog)s %(version)s")
def root() -> None:
    """Example: mlxsup run mlx-community/SmolLM2-135M-Instruct

    Serves several MLX language models at once, each in its own process.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; no traceback ever reaches a user."""
    given = expand(sys.argv[1:] if arguments is None else arguments)
    output = Output.from_arguments(given)
    is_closed = sys.stdout is None
    _replace_closed_streams()
    if hasattr(sys.stdout, "reconfigure"):
        # An answer may contain what the terminal's encoding cannot express.
        sys.stdout.reconfigure(errors="replace")
    guard_streams()
    if is_closed:
        Output(is_plain=output.is_plain).error(_closed_stdout())
        sys.exit(ExitStatus.FAILED)
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        sys.exit(_complete(instruction))
    try:
        status = _run(given, output)
        sys.stdout.flush()
    except BrokenPipeError:
        status = ExitStatus.BROKEN_PIPE
        discard(sys.stdout)
    except OSError as error:
        status = ExitStatus.FAILED
        discard(sys.stdout)
        message = f"cannot write the output: {error.strerror or error}"
        Output(is_plain=output.is_plain).error(CliError(message, code="output"))
    sys.exit(status)


def _closed_stdout() -> CliError:
    """Return the refusal: output would be lost, and a file opened next could take its place."""
    return CliError(
        "standard output is closed, so nothing was done",
        code="output",
        hint="to discard the output, use `>/dev/null`",
    )


def _complete(instruction: str) -> int:
    """Answer a shell that asks what may be typed at the cursor."""
    from click.shell_completion import get_completion_class

    shell, _, what = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what not in ("source", "complete"):
        return ExitStatus.FAILED
    completion = kind(root, {}, PROGRAM, COMPLETE_VARIABLE)
    # Not click's `shell_complete`: it writes bytes, which pass no guard.
    click.echo(completion.complete() if what == "complete" else completion.source())
    return ExitStatus.OK


def _replace_closed_streams() -> None:
    """Give streams that were closed before the start (`>&-`) somewhere to write to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as we run


def _run(arguments: list[str], output: Output) -> int:
    try:
        # Not `root.main`: it handles interrupts and broken pipes in its own way.
        with root.make_context(PROGRAM, list(arguments), terminal_width=help_width()) as context:
            result = root.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    except CliError as error:
        output.error(error)
        return error.status
    except click.exceptions.NoArgsIsHelpError as error:
        output.data(error.message)
        return ExitStatus.OK
    except click.ClickException as error:
        output.error(_usage_error(error, arguments))
        return ExitStatus.USAGE
    except (KeyboardInterrupt, click.Abort) as error:
        output.end_line()
        if str(error):
            output.note(str(error))
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise  # that of a stream, most likely the output; `main` knows what is left to say
        output.error(_system_error(error))
        return ExitStatus.FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        output.error(_lack(error) or _internal_error(error))
        return ExitStatus.FAILED
    return result if isinstance(result, int) else ExitStatus.OK


def help_width() -> int:
    """Return how wide help is, as click would find out with more imports."""
    return max(min(terminal_size().columns, 80) - 2, 50)


def _usage_error(error: click.ClickException, arguments: list[str]) -> CliError:
    context: Any = getattr(error, "ctx", None)
    # Some errors of click's parser do not say where they happened.
    command = context.command_path if context is not None else _command_path(arguments)
    hint = f"see `{command} -h`"
    option = getattr(error, "option_name", None)
    if option in OPTION_HABITS:
        hint = OPTION_HABITS[option]
        return CliError(f"No such option {option!r}.", hint=hint, status=ExitStatus.USAGE)
    if option is not None and context is not None and isinstance(context.command, click.Group):
        hint = f"put the option after the command: `{command} COMMAND {option}`"
        return CliError(error.message, hint=hint, status=ExitStatus.USAGE)
    # Not matched by its class, which click only has since 8.4.
    name = getattr(error, "command_name", None)
    if name is not None and command == PROGRAM:
        if name in OTHER_WAYS:
            hint = OTHER_WAYS[name]
        elif meant := guess(str(name), arguments[arguments.index(name) + 1 :]):
            hint = f"did you mean `{PROGRAM} {meant}`?"
    # What may stand for a choice is listed by click in a line each.
    message = " ".join(error.format_message().split())
    return CliError(message, hint=hint, status=ExitStatus.USAGE)


def _command_path(arguments: list[str]) -> str:
    """Return the words, from `mlxsup` on, that name a command at the start of a command line."""
    words, command = [PROGRAM], cast(click.Command, root)
    for word in arguments:
        found = None
        if isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
        if found is None:
            break
        words.append(word)
        command = found
    return " ".join(words)


def _system_error(error: OSError) -> CliError:
    path = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return CliError(
        f"{path}{error.strerror or error}",
        code="system",
        hint="fix the cause and run the command again",
    )


def _lack(error: Exception) -> CliError | None:
    """Return what the system does not give to a command; None: the error is a bug."""
    if isinstance(error, MemoryError):
        message, limit = "there is not enough memory for this command", "memory (`ulimit -v`)"
    elif isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        message, limit = "no further thread can be started", "processes (`ulimit -u`)"
    elif isinstance(error, RuntimeError) and str(error) == NO_HOME:
        message = "the user of this process has no home folder, and HOME is not set"
        return CliError(
            message, code="system", hint="set HOME to a folder that this user may write to"
        )
    else:
        return None
    hint = f"end other programs, or raise the limit of {limit} or that of the container"
    return CliError(message, code="system", hint=hint)


def _internal_error(error: Exception) -> CliError:
    return CliError(
        f"internal error: {type(error).__name__}: {error}",
        code="internal",
        hint=f"please report this bug; {TRACEBACK_VARIABLE}=1 shows a traceback",
    )
