"""The service manager of this machine, and the facts of the service that it would run."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxsup.store.hub_cache import find_cache

from ..exit_status import CliError, ExitStatus
from .calls import no_program
from .facts import NAME, ServiceFacts, UnusableFactError, kept_variables, own_program
from .launchd import Launchd
from .systemd import Systemd

Manager = Systemd | Launchd


def find_manager(*, is_system: bool) -> Manager:
    """What starts services on this machine.

    Raises:
        CliError: mlxsup knows no service manager of this system, or the user's own is meant and
            only root asks.
    """
    user = os.environ.get("SUDO_USER", "")
    if is_system:
        _become_user_of_folders(user)
    elif user and os.getuid() == 0:
        raise CliError(
            f"sudo does not reach the service manager of {user}",
            code="usage",
            hint="run it without sudo, or with --system",
            status=ExitStatus.USAGE,
        )
    home = Path.home()
    if sys.platform == "darwin":
        return Launchd(home, is_system=is_system)
    if sys.platform == "linux":
        return Systemd(home, is_system=is_system)
    raise no_program("systemctl")


def need_root(manager: Manager, command: str) -> None:
    """Refuses to write a service of the machine as anybody but root.

    Args:
        manager: of the machine.
        command: what root has to run.

    Raises:
        CliError: somebody else asks.
    """
    if os.access(_nearest(manager.path.parent), os.W_OK):
        return
    raise CliError(
        f"only root may change {manager.path}",
        code="no_permission",
        hint=f"`{command}`",
        status=ExitStatus.NO_PERMISSION,
    )


def install_by_root(facts: ServiceFacts) -> str:
    """The command that installs a service of the machine; sudo drops what only variables say."""
    return _by_root(facts.program, "install", "--config", str(facts.config))


def uninstall_by_root() -> str:
    """The command that removes a service of the machine."""
    return _by_root(_find_program(), "uninstall")


def _by_root(program: Path, command: str, *options: str) -> str:
    return shlex.join(["sudo", str(program), "service", command, "--system", *options])


@contextmanager
def acting_for_user(*, is_system: bool) -> Iterator[None]:
    """Under sudo: reads as the user that the service will run as, whose files must be that user's
    own; writes nothing."""
    user = os.environ.get("SUDO_USER", "") if is_system and os.geteuid() == 0 else ""
    if not user:
        yield
        return
    entry, group = pwd.getpwnam(user), os.getegid()
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def find_facts(
    config: Path, *, drain_s: float, runtime_dir: Path, log_dir: Path, is_system: bool
) -> ServiceFacts:
    """What a service with this configuration would be started with.

    Args:
        config: the file, which has been checked.
        drain_s, runtime_dir, log_dir: as it says.
        is_system: whether it is a service of the machine.

    Raises:
        CliError: mlxsup is not installed as a program, or a path has a sign that
            no service file can express.
    """
    found = shutil.which("nvidia-smi")
    user = os.environ.get("SUDO_USER", "") if is_system else ""
    facts = ServiceFacts(
        program=_find_program(),
        config=config,
        home=Path.home(),
        user=user or pwd.getpwuid(os.getuid()).pw_name,
        is_system=is_system,
        drain_s=drain_s,
        runtime_dir=runtime_dir,
        log_dir=log_dir,
        model_cache=find_cache(),
        variables=kept_variables(os.environ),
        more_path=(str(Path(found).parent),) if found else (),
    )
    try:
        facts.check()
    except UnusableFactError as error:
        raise CliError(
            f"no service file can be written: {error}",
            code="unusable_path",
            hint="move or rename it",
        ) from None
    return facts


def _find_program() -> Path:
    program = own_program(sys.argv[0], sys.executable, shutil.which(NAME))
    if program is None:
        raise CliError(
            f"there is no program {NAME} next to {sys.executable}, which a service could start",
            code="not_a_program",
            hint="install mlxsup with pip, uv or pipx",
        )
    return program


def _become_user_of_folders(user: str) -> None:
    """Under sudo, `~` is root's; the service has the folders of whoever asks."""
    if not user:
        return
    try:
        os.environ["HOME"] = pwd.getpwnam(user).pw_dir
    except KeyError:
        raise CliError(f"there is no user {user}", hint="see SUDO_USER") from None


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.exists())
