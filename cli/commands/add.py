"""`mlxsup add`: makes the configuration, and the daemon that runs, serve one more model."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from mlxsup.protocol.close_names import close_names
from mlxsup.protocol.folders import DEFAULT_CONFIG
from mlxsup.protocol.places import find_config
from mlxsup.store.folder_problems import GGUF_SUFFIX
from mlxsup.store.hub_cache import DEFAULT_REVISION, find_snapshot, is_owned_repository
from mlxsup.store.search import short_name

from ..arguments import complete_repository
from ..configuration import change_configuration, read_configuration, write_configuration
from ..connection import Target, connect, daemon_options, meant, status_of_daemon
from ..downloading import checked_repository, download
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

RESERVED = frozenset({"mlxsup", "mlxsup-gateway"})
"""Names of the daemon's own log files."""

OTHER_KINDS = {"datasets": "a dataset", "spaces": "a space", "collections": "a collection"}
"""Other things that an address on the hub may name, by the first word of its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place of a model, as its entry in a configuration has it.

    Attributes:
        title: what it is called there.
        folder: its folder; None for a repository that is not downloaded.
        repo: OWNER/NAME; empty for a folder.
        revision: of the repository.
    """

    title: str
    folder: Path | None
    repo: str = ""
    revision: str = DEFAULT_REVISION

    def is_that_of(self, repo: str, folder: str) -> bool:
        """True if an entry with that repository, or else that folder, has the same model."""
        if self.repo and self.repo == repo:
            return True
        return bool(self.folder and folder) and os.path.realpath(
            str(self.folder)
        ) == os.path.realpath(folder)

    def entry(self) -> dict[str, str]:
        """Return the keys of its table."""
        if not self.repo:
            return {"path": str(self.folder)}
        is_usual = self.revision == DEFAULT_REVISION
        return {"repo": self.repo} | ({} if is_usual else {"revision": self.revision})


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The outcome of a request to serve a model.

    Attributes:
        name: what the configuration calls the model.
        path: the configuration file.
        is_new: true if it was not there before.
        is_served: true if a daemon serves it now.
    """

    name: str
    path: Path
    is_new: bool
    is_served: bool


@click.command()
@click.argument("source", metavar="MODEL", shell_complete=complete_repository)
@click.option("--name", metavar="NAME", help="The name of the model; by default, a short one.")
@daemon_options
def add(source: str, name: str | None, target: Target, output: Output) -> None:
    """Example: mlxsup add mlx-community/SmolLM2-135M-Instruct

    Adds MODEL to the configuration and to a running daemon. MODEL is OWNER/NAME or its address in a
    browser (downloaded if necessary), a folder, a GGUF file (converted), or a model that `mlxsup
    models` lists. `mlxsup rm` removes it.
    """
    added = serve_also(source, name, target, output)
    value = {
        "name": added.name, "path": str(added.path), "added": added.is_new,
        "served": added.is_served,
    }  # fmt: skip
    said = f"{added.name} is already configured in {added.path}"
    if added.is_new:
        said = f"added {added.name} to {added.path}"
    output.result(value, said)
    if added.is_served:
        output.note(target.repeat_in(f"hint: `mlxsup chat {added.name}`"))
    else:
        output.note(target.repeat_in("hint: `mlxsup start --detach` serves it"))


def serve_also(model: str, name: str | None, target: Target, output: Output) -> Added:
    """Write the entry of a model, and have the daemon read it if one runs.

    Args:
        model: as users name it.
        name: what to call it; None: by a short name.
        target: the daemon, or its file.
        output: for the progress of a download or a conversion.

    Raises:
        CliError: it is no model, cannot be served, or its entry cannot be written; then the
            configuration is as it was.
    """
    path = file_of(target)
    if path is None:
        raise CliError(
            "the running daemon has no configuration file",
            code="no_config",
            hint=(
                "run `mlxsup stop`, add the models with `mlxsup add`, then run `mlxsup start "
                "--detach`"
            ),
        )
    configuration = read_configuration(path) if path.expanduser().exists() else None
    if name is not None:
        _check_name(name, configuration)
    source = _find(model)
    if configuration is not None and (known := _name_of(source, configuration)) is not None:
        return Added(name=known, path=path, is_new=False, is_served=_reload(path, target))
    source = _made_ready(source, output, again=f"mlxsup add {shlex.quote(model)}")
    taken = {called.lower() for called in _names_in(configuration)} | RESERVED
    name = name or short_name(source.title, taken)
    _write(path, name, source)
    return Added(name=name, path=path, is_new=True, is_served=_reload(path, target))


def file_of(target: Target) -> Path | None:
    """Return the file of the daemon that runs, or else the one that `start` would read or make.

    Returns:
        None if the daemon was started without a file.
    """
    status = status_of_daemon(target)
    if status is not None:
        return Path(status["config_path"]) if status["config_path"] else None
    found = find_config(target.config)
    return found.path if found is not None else Path(DEFAULT_CONFIG).expanduser()


def _check_name(name: str, configuration: DaemonConfig | None) -> None:
    """Refuse a name that no model can have, or that one has."""
    from mlxsup.supervisor.config.lines import MODEL_NAME, MODEL_NAME_EXPECTED

    if not MODEL_NAME.fullmatch(name) or name.lower() in RESERVED:
        message = f"a name has {MODEL_NAME_EXPECTED}; {', '.join(sorted(RESERVED))} are reserved"
        raise CliError(message, status=ExitStatus.USAGE)
    if name.lower() in {called.lower() for called in _names_in(configuration)}:
        hint = "choose another name, or see `mlxsup models`"
        raise CliError(f"the name {name} is already taken", hint=hint, status=ExitStatus.USAGE)


def _names_in(configuration: DaemonConfig | None) -> list[str]:
    """Return the names that are taken; aliases are names, too."""
    models = configuration.models if configuration is not None else ()
    return [called for one in models for called in (str(one.name), *one.aliases)]


def _find(model: str) -> Source:
    """Return what is meant: a folder or file, a repository, or a model that is on this machine.

    Raises:
        CliError: it is none of them.
    """
    path = Path(model).expanduser()
    if model and os.path.lexists(path):
        return Source(title=path.absolute().name, folder=path.absolute())
    if _is_path(model):
        raise CliError(f"{path.absolute()} does not exist", code="not_found")
    repo, revision = _repository(model)
    if repo:
        try:
            snapshot = find_snapshot(repo, revision)
        except OSError:
            snapshot = None
        is_there = snapshot is not None and snapshot.is_complete
        folder = snapshot.path if snapshot is not None and is_there else None
        return Source(title=repo, folder=folder, repo=repo, revision=revision)
    return _listed(model)


def _is_path(model: str) -> bool:
    """True if that can only be the name of a file or a folder."""
    is_file = model.lower().endswith(GGUF_SUFFIX) and "://" not in model
    return model.startswith(("/", "./", "../", "~")) or is_file


def _repository(model: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision of a repository's name or address; empty if it is none.

    Raises:
        CliError: it is the address of something else.
    """
    if is_owned_repository(model):
        return model, DEFAULT_REVISION
    host, _, _ = model.partition("/")
    if "://" not in model and "." not in host:
        return "", ""
    address = urlsplit(model if "://" in model else f"https://{model}")
    parts = [part for part in address.path.split("/") if part]
    if parts and (kind := OTHER_KINDS.get(parts[0])):
        raise CliError(f"{model} is the address of {kind}, not of a model", code="not_a_model")
    if parts and parts[-1].lower().endswith(GGUF_SUFFIX):
        raise CliError(
            f"{model} is the address of one file",
            code="not_a_model",
            hint=f"download it, then `mlxsup add {shlex.quote(parts[-1])}`",
        )
    repo = "/".join(parts[:2])
    if len(parts) < 2 or not is_owned_repository(repo):
        hint = "the address of a model ends in OWNER/NAME"
        raise CliError(f"{model} is not the address of a model", status=ExitStatus.USAGE, hint=hint)
    has_revision = len(parts) > 3 and parts[2] in ("tree", "blob", "resolve")
    return repo, parts[3] if has_revision else DEFAULT_REVISION


def _listed(model: str) -> Source:
    """Return the model on this machine that is called so, as `mlxsup models` or `init` has it.

    Raises:
        CliError: none is.
    """
    from .models import catalogue

    rows = [row for row in catalogue(None) if row["path"]]
    for row in rows:
        called = (row["title"], row["title"].rpartition("/")[2], short_name(row["title"], ()))
        if model in called:
            repo, revision = row["repo"] or "", row["revision"] or DEFAULT_REVISION
            return Source(
                title=row["title"], folder=Path(row["path"]), repo=repo, revision=revision
            )
    close = close_names(model, [short_name(row["title"], ()) for row in rows])
    raise CliError(
        f"there is no model {model!r} on this machine",
        code="unknown_model",
        hint=meant(close) or "give OWNER/NAME to download it, or choose one from `mlxsup models`",
    )


def _name_of(source: Source, configuration: DaemonConfig) -> str | None:
    """Return what the configuration calls the model; None if it does not have it."""
    for one in configuration.models:
        if one.launch.engine == "mlx" and source.is_that_of(one.repo, one.launch.path):
            return str(one.name)
    return None


def _made_ready(source: Source, output: Output, *, again: str) -> Source:
    """Download or convert what a worker could not load as it is.

    Raises:
        CliError: that fails, or it cannot be served even then.
    """
    from .models import row_of_path

    folder = source.folder
    if folder is None:
        repository = checked_repository(source.repo, source.revision)
        folder = Path(download(repository, output, again=again).folder)
    elif folder.suffix.lower() == GGUF_SUFFIX and not folder.is_dir():
        from .convert import converted

        made = converted(folder, output)
        return Source(title=made.name, folder=made)
    row = row_of_path(folder)
    if row["problem"]:
        hint = row["hint"] or f"`mlxsup show {shlex.quote(source.repo or str(folder))}`"
        raise CliError(row["problem"], code="model_folder", hint=hint)
    return replace(source, folder=folder)


def _write(path: Path, name: str, source: Source) -> None:
    """Write the entry, in a new file if there is none."""
    from .init import HEAD

    expanded = path.expanduser()
    try:
        if expanded.exists():
            change_configuration(path, lambda models: models.update({name: source.entry()}))
        else:
            import tomlkit

            expanded.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            entry = tomlkit.dumps({"models": {name: source.entry()}})
            write_configuration(expanded, f"{HEAD}\n{entry}")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        hint = "choose another file with --config FILE"
        raise CliError(message, code="output", hint=hint) from None


def _reload(path: Path, target: Target) -> bool:
    """Have the daemon read its file again; return whether one runs."""
    if status_of_daemon(target) is None:
        return False
    with connect(target) as client:
        client.reload()
    return True
