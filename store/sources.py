"""The model that a user means: a folder, a file, a repository or its address, or a name here."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.suggestions import close_names, did_you_mean

from .hub_cache import check_revision, find_snapshot, is_offline, is_owned_repository
from .local_models import FoundModel, Origin, find_models, look_at, served_types, short_name
from .model_folder import GGUF_SUFFIX, damage, missing_files, repository_problem

OTHER_KINDS = {"datasets": "a dataset", "spaces": "a space", "collections": "a collection"}
"""Other things that an address on the hub may name, by the first word of its path."""

REVISION_FOLLOWS = ("tree", "blob", "resolve")
"""The word between the name and the revision in the address of a repository's files."""

SHORT_NAMES = {
    "gemma3": "gemma-3-4b-it-4bit",
    "gemma3:1b": "gemma-3-1b-it-4bit",
    "gemma3:4b": "gemma-3-4b-it-4bit",
    "gemma3:12b": "gemma-3-12b-it-4bit",
    "gpt-oss": "gpt-oss-20b-MXFP4-Q8",
    "gpt-oss:20b": "gpt-oss-20b-MXFP4-Q8",
    "llama3.1": "Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.1:8b": "Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.2": "Llama-3.2-3B-Instruct-4bit",
    "llama3.2:1b": "Llama-3.2-1B-Instruct-4bit",
    "llama3.2:3b": "Llama-3.2-3B-Instruct-4bit",
    "llama3.3": "Llama-3.3-70B-Instruct-4bit",
    "llama3.3:70b": "Llama-3.3-70B-Instruct-4bit",
    "mistral": "Mistral-7B-Instruct-v0.3-4bit",
    "mistral:7b": "Mistral-7B-Instruct-v0.3-4bit",
    "qwen2.5-coder": "Qwen2.5-Coder-7B-Instruct-4bit",
    "qwen2.5-coder:7b": "Qwen2.5-Coder-7B-Instruct-4bit",
    "qwen3": "Qwen3-8B-4bit",
    "qwen3:0.6b": "Qwen3-0.6B-4bit",
    "qwen3:1.7b": "Qwen3-1.7B-4bit",
    "qwen3:4b": "Qwen3-4B-4bit",
    "qwen3:8b": "Qwen3-8B-4bit",
    "qwen3:14b": "Qwen3-14B-4bit",
    "qwen3:30b": "Qwen3-30B-A3B-4bit",
    "qwen3:32b": "Qwen3-32B-4bit",
    "smollm2": "SmolLM2-135M-Instruct",
    "smollm2:135m": "SmolLM2-135M-Instruct",
    "smollm2-135m": "SmolLM2-135M-Instruct",
}
"""Names that people know from Ollama, and the repository of mlx-community that each means here."""

EXAMPLE = "mlx-community/SmolLM2-135M-Instruct"
"""The small model of every example."""


class RefusedModelError(Exception):
    """A model that cannot be added or removed; nothing has changed.

    Attributes:
        code: of the error, as `--json` has it.
        message: one sentence without a full stop.
        hint: the command that helps; may be empty.
    """

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place of a model, as its entry in a configuration has it.

    Attributes:
        title: what it is called there.
        folder: its folder, or a GGUF file; None for a repository that is not downloaded.
        repo: OWNER/NAME; empty for a folder.
        revision: of the repository.
    """

    title: str
    folder: Path | None
    repo: str = ""
    revision: str = DEFAULT_REVISION

    @property
    def is_gguf(self) -> bool:
        """True if it has to be converted first."""
        folder = self.folder
        return folder is not None and folder.suffix.lower() == GGUF_SUFFIX and not folder.is_dir()

    def is_that_of(self, repo: str, revision: str, folder: str) -> bool:
        """True if an entry with that repository, or else that folder, has the same model."""
        if self.repo and (self.repo, self.revision) == (repo, revision):
            return True
        if self.folder is None or not folder or (self.repo and repo):
            return False
        return os.path.realpath(str(self.folder)) == os.path.realpath(folder)

    def entry(self) -> dict[str, str]:
        """Return the keys of its table."""
        if not self.repo:
            return {"path": str(self.folder)}
        is_usual = self.revision == DEFAULT_REVISION
        return {"repo": self.repo} | ({} if is_usual else {"revision": self.revision})


def find_source(model: str, revision: str | None = None, *, is_here: bool = True) -> Source:
    """Return what is meant: a folder or file, a repository, or a model that is on this machine.

    Args:
        model: as the user named it.
        revision: of a repository; None: that of the address, or the usual one.
        is_here: whether paths may be relative to the current folder, as the user's are.

    Raises:
        RefusedModelError: it is none of them.
    """
    path = Path(os.path.expanduser(model))  # which leaves the `~name` of an unknown user
    may_be_path = is_here or path.is_absolute()
    if model and may_be_path and os.path.lexists(path):
        return Source(title=path.absolute().name, folder=path.absolute())
    if _is_path(model):
        if may_be_path:
            raise RefusedModelError("not_found", f"{path.absolute()} does not exist")
        message = f"{model} is not an absolute path; the daemon has another current folder"
        raise RefusedModelError("usage", message)
    repo, named = repository_named(model)
    return _repository(repo, revision or named) if repo else _listed(model)


def servable(source: Source) -> Source:
    """Return a model that a worker can load as it is, or once it is downloaded.

    Raises:
        RefusedModelError: it is none; says why.
    """
    if source.folder is None:
        problem = repository_problem(source.repo, source.revision) if is_offline() else None
    else:
        found = look_at(source.folder, source.title, Origin.NAMED, served_types())
        problem = found.problem or damage(source.folder)
    if problem is None:
        return source
    named = shlex.quote(source.repo or str(source.folder))
    hint = f"`mlxsup add {named}` converts it" if source.is_gguf else problem.hint
    raise RefusedModelError("model_folder", problem.text, hint or f"`mlxsup show {named}`")


def repository_named(model: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision of a repository's name or address; empty if it is none.

    Raises:
        RefusedModelError: it is the address of something else.
    """
    if is_owned_repository(model):
        return model, DEFAULT_REVISION
    host, _, _ = model.partition("/")
    if "://" not in model and "." not in host.strip("."):
        return "", ""
    try:
        address = urlsplit(model if "://" in model else f"https://{model}")
    except ValueError:  # a bracket in the name of the host
        raise _no_address(model) from None
    parts = [part for part in address.path.split("/") if part]
    if parts and (kind := OTHER_KINDS.get(parts[0])):
        message = f"{model} is the address of {kind}, not of a model"
        raise RefusedModelError("not_a_model", message)
    if parts and parts[-1].lower().endswith(GGUF_SUFFIX):
        hint = f"download it, then `mlxsup add {shlex.quote(parts[-1])}`"
        raise RefusedModelError("not_a_model", f"{model} is the address of one file", hint)
    repo = "/".join(parts[:2])
    if not is_owned_repository(repo):
        raise _no_address(model)
    has_revision = len(parts) > 3 and parts[2] in REVISION_FOLLOWS
    return repo, parts[3] if has_revision else DEFAULT_REVISION


def _no_address(model: str) -> RefusedModelError:
    hint = "the address of a model ends in OWNER/NAME"
    return RefusedModelError("usage", f"{model} is not the address of a model", hint)


def short_repository(name: str) -> str | None:
    """Return the repository that a short name means; None if it is none."""
    found = SHORT_NAMES.get(name.lower().removesuffix(":latest"))
    return f"mlx-community/{found}" if found is not None else None


def is_reference(model: str) -> bool:
    """True if that can be no name of a model, because it has the form of a path or an address."""
    return "/" in model or _is_path(model)


def _is_path(model: str) -> bool:
    """True if that can only be the name of a file or a folder."""
    is_file = model.lower().endswith(GGUF_SUFFIX) and "://" not in model
    return model.startswith(("/", "./", "../", "~")) or is_file


def _repository(repo: str, revision: str) -> Source:
    """Return a repository, with its folder if the cache has it; else LM Studio's copy, if any.

    Raises:
        RefusedModelError: no revision can be called so.
    """
    try:
        snapshot = find_snapshot(repo, check_revision(revision))
        if snapshot is not None and not missing_files(snapshot):
            return Source(title=repo, folder=snapshot, repo=repo, revision=revision)
    except ValueError as error:
        raise RefusedModelError("usage", f"{revision!r} is not {error}") from None
    except OSError:
        pass  # what the cache has cannot be read
    if revision == DEFAULT_REVISION:
        for found in find_models():
            if found.title == repo and not found.repo and found.problem is None:
                return _of(found)
    return Source(title=repo, folder=None, repo=repo, revision=revision)


def _listed(model: str) -> Source:
    """Return the model on this machine that is called so, as `mlxsup models` or `init` has it.

    Raises:
        RefusedModelError: none is, or several are.
    """
    found = find_models()
    for called in (
        lambda one: one.title,
        lambda one: one.title.rpartition("/")[2],
        lambda one: short_name(one.title, ()),
    ):
        same = [one for one in found if called(one) == model]
        if len(same) == 1:
            return _of(same[0])
        if same:
            named = ", ".join(f"{one.repo or one.path} ({one.origin})" for one in same)
            hint = f"`mlxsup add {shlex.quote(same[0].repo or str(same[0].path))}`"
            message = f"{len(same)} models on this machine are called {model!r}: {named}"
            raise RefusedModelError("ambiguous", message, hint)
    if (repo := short_repository(model)) is not None:
        return _repository(repo, DEFAULT_REVISION)
    names = [short_name(one.title, ()) for one in found]
    close = close_names(model, [*names, *SHORT_NAMES])
    raise RefusedModelError(
        "unknown_model",
        f"there is no model {model!r} on this machine",
        did_you_mean(close) or f"`mlxsup search {shlex.quote(model)}` looks for one on the hub",
    )


def _of(found: FoundModel) -> Source:
    return Source(
        title=found.title,
        folder=found.path,
        repo=found.repo,
        revision=found.revision or DEFAULT_REVISION,
    )
