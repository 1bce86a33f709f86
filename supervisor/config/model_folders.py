"""The folders of a configuration's models: which of them cannot be loaded as they are now."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.ids import ModelName
from mlxsup.store.hub_cache import is_offline
from mlxsup.store.model_folder import FolderProblem, repository_problem

from ..core.settings import ModelSettings
from ..memory.folder_reader import Look, Question, place_of
from .lines import LineIndex
from .load import ConfigError, DaemonConfig, read_text


def model_problems(config: DaemonConfig) -> dict[ModelName, FolderProblem]:
    """Return the models that a load would refuse, each with why; a worker finds out more.

    The folders are read in another process, as by a daemon: one that hangs keeps nobody waiting.
    """
    questions = [
        Question(number=number, place=place, is_checked=True)
        for number, model in enumerate(config.models)
        if model.launch.engine == "mlx"
        and (place := place_of(model.launch, model.repo, model.revision)) is not None
    ]
    if not questions:
        return {}
    import asyncio  # without models no command waits for the two

    from ..memory.estimates import ask

    answers = asyncio.run(ask(questions))
    problems = {
        config.models[number].name: _problem(config.models[number], answers[number])
        for number in sorted(answers)
    }
    return {name: problem for name, problem in problems.items() if problem is not None}


def check_model_folders(config: DaemonConfig, path: Path) -> None:
    """Check the folders of all models.

    Raises:
        ConfigError: names each model with a folder that cannot be loaded.
    """
    problems = model_problems(config)
    if not problems:
        return
    lines = LineIndex(read_text(path.expanduser()).text)
    keys = {model.name: "repo" if model.repo else "path" for model in config.models}
    raise ConfigError(
        [
            f"{path}:{lines.find(('models', name, keys[name]))}: models.{name}.{keys[name]}: "
            + sentence(problem)
            for name, problem in problems.items()
        ]
    )


def sentence(problem: FolderProblem) -> str:
    """Return the problem and what to do, in one line."""
    return f"{problem.text}; {problem.hint}" if problem.hint else problem.text


def _problem(model: ModelSettings, answer: Look | str) -> FolderProblem | None:
    if isinstance(answer, str):
        return FolderProblem(text=answer)
    if answer.is_lacking and not is_offline():
        return None  # it is downloaded before it is loaded
    if answer.problem:
        return FolderProblem(text=answer.problem, hint=answer.hint)
    return repository_problem(model.repo, model.revision) if answer.is_lacking else None
