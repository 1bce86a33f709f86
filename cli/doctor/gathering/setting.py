"""The configuration, and what follows from it: which daemon is meant, and which models."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxsup.protocol import places
from mlxsup.protocol.folders import CLIENT_SOCKET_NAME, DEFAULT_RUNTIME_DIR, default_log_dir
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.places import ConfigPlace, UnreadableConfigError
from mlxsup.store.hub_cache import OFFLINE_VARIABLES, YES

from ...connection import Target
from ...exit_status import CliError
from ...keys import find_keys
from ..facts import ConfigFile, Configuration, Hub, ModelFolder

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all facts are about.

    Attributes:
        endpoint: where commands look for the daemon.
        configuration: the file that counts.
        loaded: what it says; None if there is none, or anything in it is wrong.
        runtime_dir: that a daemon with this configuration would use.
        log_dir: likewise.
        listen: where a gateway is to listen, unchecked; empty without one.
        key_need: why its requests need keys even if there never was one, unchecked.
        keys: where its keys are.
    """

    endpoint: str
    configuration: Configuration
    loaded: DaemonConfig | None
    runtime_dir: Path
    log_dir: Path
    listen: str
    key_need: str
    keys: KeyPlace


def find_setting(target: Target) -> Setting:
    """Reads the configuration that counts.

    Args:
        target: the options.

    Raises:
        CliError: the endpoint that was given is none.
    """
    looked_at = tuple(_config_file(place) for place in places.config_places(target.config))
    configuration = Configuration(
        looked_at=looked_at,
        endpoint_variable=os.environ.get(places.ENDPOINT_VARIABLE, ""),
        problems=(),
        models=0,
    )
    counting = configuration.counting
    path = counting.path if counting is not None and counting.is_there else None
    loaded, problems = (None, ()) if path is None else _load(path)
    runtime_dir, log_dir = _folders(path)
    return Setting(
        endpoint=_endpoint(target, runtime_dir),
        configuration=replace(
            configuration, problems=problems, models=len(loaded.models) if loaded else 0
        ),
        loaded=loaded,
        runtime_dir=runtime_dir,
        log_dir=log_dir,
        listen="" if path is None else _listen(path),
        key_need="" if path is None else _key_need(path),
        keys=_keys(target, path, runtime_dir),
    )


def _config_file(place: ConfigPlace) -> ConfigFile:
    return ConfigFile(
        path=place.path.expanduser().absolute(),
        source=place.source,
        is_named=place.is_named,
        is_there=place.is_there,
    )


def _load(path: Path) -> tuple[DaemonConfig | None, tuple[str, ...]]:
    from mlxsup.supervisor.config.load import ConfigError, load_config

    try:
        return load_config(path), ()
    except ConfigError as error:
        return None, tuple(error.problems)


def _folders(path: Path | None) -> tuple[Path, Path]:
    """The runtime and the log folder, as far as the file can be read."""
    runtime_dir = Path(DEFAULT_RUNTIME_DIR).expanduser()
    log_dir = default_log_dir(runtime_dir)
    if path is not None:
        with suppress(UnreadableConfigError):
            runtime_dir = places.runtime_dir_of(path)
            log_dir = places.log_dir_of(path)
    return runtime_dir, log_dir


def _endpoint(target: Target, runtime_dir: Path) -> str:
    try:
        return target.find_endpoint()
    except CliError:
        if target.endpoint is not None:
            raise
        # What is wrong with the file, or with its folder, is a finding.
        return f"ipc://{runtime_dir / CLIENT_SOCKET_NAME}"


def _listen(path: Path) -> str:
    """Where the gateway of a file is to listen, as far as the file can be read."""
    from mlxsup.protocol.gateway import DEFAULT_LISTEN

    try:
        table = places.read_toml(path).get("gateway")
    except UnreadableConfigError:
        return ""
    listen = table.get("listen", DEFAULT_LISTEN) if isinstance(table, dict) else ""
    return listen if isinstance(listen, str) else ""


def _keys(target: Target, path: Path | None, runtime_dir: Path) -> KeyPlace:
    try:
        return find_keys(target)
    except CliError:  # what is wrong with the file, or with its folder, is a finding
        return KeyPlace.beside(path, runtime_dir)


def _key_need(path: Path) -> str:
    """Return why requests to the gateway of a file need keys, as far as the file can be read."""
    from mlxsup.protocol.gateway import key_need_in

    with suppress(UnreadableConfigError):
        need = key_need_in(places.read_toml(path).get("gateway"))
        return f"gateway.{need[0]} {need[1]}" if need is not None else ""
    return ""


def gather_configuration(setting: Setting) -> Configuration:
    """What is wrong with the file, what its models need in memory included."""
    if setting.loaded is None:
        return setting.configuration
    from mlxsup.supervisor.config.load import ConfigError
    from mlxsup.supervisor.memory.estimator import check_memory

    try:
        check_memory(setting.loaded)
    except ConfigError as error:
        return replace(setting.configuration, problems=tuple(error.problems))
    return setting.configuration


def gather_models(setting: Setting) -> tuple[ModelFolder, ...]:
    """The folders of models that need no download."""
    if setting.loaded is None:
        return ()
    from mlxsup.supervisor.config.model_folders import model_problems

    problems = model_problems(setting.loaded)
    return tuple(
        ModelFolder(
            name=model.name,
            problem=problems[model.name].text if model.name in problems else "",
            hint=problems[model.name].hint if model.name in problems else "",
        )
        for model in setting.loaded.models
        if model.launch.engine == "mlx" and model.download is None
    )


def offline_variable() -> str:
    """The variable that forbids downloads; empty if none does."""
    return next((name for name in OFFLINE_VARIABLES if os.environ.get(name, "").upper() in YES), "")


def gather_hub(setting: Setting) -> Hub:
    """What is to be downloaded, and whether there is a token; never the token."""
    models = setting.loaded.models if setting.loaded is not None else ()
    variable = next((name for name in TOKEN_VARIABLES if os.environ.get(name)), "")
    path = _token_path()
    mode = None
    with suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
    return Hub(
        offline=offline_variable(),
        missing=tuple((model.name, model.download) for model in models if model.download),
        token=variable or (str(path) if mode is not None else ""),
        token_path=path if mode is not None else None,
        token_mode=mode,
    )


def _token_path() -> Path:
    """Where huggingface_hub keeps the token."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    named = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
    return Path(os.path.expandvars(os.path.expanduser(named)))
