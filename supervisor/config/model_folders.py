"""The folders of a configuration's models: which of them cannot be loaded as they are now."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.ids import ModelName
from mlxsup.store.folder_problems import FolderProblem, folder_problem, repository_problem
from mlxsup.store.offline import is_offline

from ..core.settings import ModelSettings
from ..memory.folder import FolderError, read_folder
from .lines import LineIndex
from .load import ConfigError, DaemonConfig


def model_problems(config: DaemonConfig) -> dict[ModelName, FolderProblem]:
    """The models that a load would refuse, each with why; a worker finds out more."""
    problems = {model.name: _problem(model) for model in config.models}
    return {name: problem for name, problem in problems.items() if problem is not None}


def check_model_folders(config: DaemonConfig, path: Path) -> None:
    """Checks the folders of all models.

    Args:
        config: what the file says.
        path: the file, as errors call it.

    Raises:
        ConfigError: names each model with a folder that cannot be loaded.
    """
    problems = model_problems(config)
    if not problems:
        return
    lines = LineIndex(path.expanduser().read_text(encoding="utf-8"))
    keys = {model.name: "repo" if model.repo else "path" for model in config.models}
    raise ConfigError(
        [
            f"{path}:{lines.find(('models', name, keys[name]))}: models.{name}.{keys[name]}: "
            + sentence(problem)
            for name, problem in problems.items()
        ]
    )


def sentence(problem: FolderProblem) -> str:
    """The problem and what to do, in one line."""
    return f"{problem.text}; {problem.hint}" if problem.hint else problem.text


def _problem(model: ModelSettings) -> FolderProblem | None:
    if model.launch.engine != "mlx":
        return None
    path = Path(model.launch.path)
    if model.download is not None and not is_offline():
        return None  # it is downloaded before it is loaded
    if model.repo and not path.exists():
        return repository_problem(model.repo, model.revision)
    problem = folder_problem(path)
    if problem is None:
        try:
            read_folder(path)
        except FolderError as error:
            return FolderProblem(text=str(error))
    return problem
