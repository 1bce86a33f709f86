"""What the file of a service is made of, and nothing else: the same facts give the same file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAME = "mlxsup"

MARKER = f"Written by `{NAME} service install`; `{NAME} service uninstall` removes it."
"""Is in every file that we write. One without it was written by somebody else."""

PERMANENT_EXITS = (64, 73, 75, 78)
"""What another start does not help against: usage, folders, another daemon, configuration."""

END_S = 15
"""How long ending the processes may take after the drain."""

SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")

KEPT_VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT",
)  # fmt: skip
"""Of the environment in which the service is installed: they say where models are. No shell of the
user's is asked when it starts, so they would be missing. Secrets are not among them."""

FORBIDDEN = '\\"'


class UnusableFactError(ValueError):
    """A service file cannot express it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Everything that a service file says.

    Attributes:
        program: the `mlxsup` that it starts: a path that outlives an upgrade.
        config: the configuration file.
        home: the home folder of the user that it runs as.
        user: that user's name.
        is_system: whether it is a service of the machine, which runs without a login.
        drain_s: how long running requests may take when it is stopped.
        runtime_dir: where its sockets are.
        log_dir: where its logs are.
        model_cache: the Hugging Face cache.
        variables: further variables of its environment.
        more_path: folders to look for programs in, besides the usual ones.
    """

    program: Path
    config: Path
    home: Path
    user: str
    is_system: bool
    drain_s: float
    runtime_dir: Path
    log_dir: Path
    model_cache: Path
    variables: tuple[tuple[str, str], ...] = ()
    more_path: tuple[str, ...] = ()

    @property
    def stop_s(self) -> int:
        """How long the service manager waits for its end, in seconds."""
        return math.ceil(self.drain_s) + END_S

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it is started with."""
        folders = dict.fromkeys([str(self.program.parent), *self.more_path, *SYSTEM_PATH])
        return {"PATH": ":".join(folders), **dict(self.variables)}

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that it writes to, without those inside of others."""
        wanted = sorted({self.home / f".{NAME}", self.runtime_dir, self.log_dir, self.model_cache})
        return tuple(
            one for one in wanted if not any(one != o and one.is_relative_to(o) for o in wanted)
        )

    def check(self) -> None:
        """Refuses what no service file can express.

        Raises:
            UnusableFactError: names it.
        """
        texts = [self.program, self.config, *self.folders, *self.environment.values()]
        for text in map(str, texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                shown = text.encode("utf-8", "replace").decode()
                raise UnusableFactError(f"{shown} is not UTF-8 text") from None
            if any(sign in FORBIDDEN or not sign.isprintable() for sign in text):
                raise UnusableFactError(
                    f"{text!r} has a sign that a service file cannot express: a quotation mark, a"
                    " backslash, or one that is not printable"
                )


def kept_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of an environment that the service needs, too."""
    return tuple((name, environment[name]) for name in KEPT_VARIABLES if environment.get(name))


def own_program(command: str, interpreter: str, found: str | None) -> Path | None:
    """The path of the `mlxsup` that runs, as a service should start it; None if there is none.

    Args:
        command: what was run, `sys.argv[0]`.
        interpreter: `sys.executable`.
        found: what a shell would run, `shutil.which("mlxsup")`. If that is this very program, as
            the link in `~/.local/bin` of uv and pipx is, it counts: an upgrade keeps it.
    """
    given = Path(os.path.abspath(command))
    own = given if given.name == NAME else Path(interpreter).parent / NAME
    if not own.is_file():
        return None
    if found is not None and Path(found).is_file() and os.path.samefile(found, own):
        return Path(os.path.abspath(found))
    return own
