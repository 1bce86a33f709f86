"""The tables of the configuration file: their keys, what each takes, and the defaults.

A default comes from the settings that the key becomes, so that no number is written twice. The
description of a field is what an error says was expected; words speak for themselves. Its title
says what the key does; `tools/reference.py` prints titles into the example file, and for editors
into the schema.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from mlxsup.protocol.folders import DEFAULT_LISTEN, DEFAULT_LOG_DIR, DEFAULT_RUNTIME_DIR
from mlxsup.protocol.gateway import ADDRESS_EXPECTED
from mlxsup.protocol.ids import DEFAULT_REVISION, ModelName
from mlxsup.protocol.launch import MOST_DRAFT_TOKENS, GroupHost, LaunchSettings
from mlxsup.protocol.parameters import NUMBERS, SAMPLING, NumberParameter
from mlxsup.store.hub_cache import REPOSITORY_EXPECTED

from ..core.settings import ANYONE, ClientSettings, CoreSettings, ModelSettings, RestartSettings
from .lines import MODEL_NAME, Place
from .values import (
    Alias,
    Class,
    Count,
    CountFromOne,
    CountOrAuto,
    DecodeShare,
    Drafts,
    Duration,
    DurationAboveZero,
    Flag,
    Folder,
    Host,
    JsonTable,
    Origin,
    Repository,
    Revision,
    SizeAboveZero,
    SizeAboveZeroOrAuto,
    SizeAutoOrOff,
    SizeOrAuto,
    WarmWorkers,
)

MAX_CONCURRENCY = 1024
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000
MAX_ADAPTERS, MAX_HOSTS = 128, 64
MAX_SITES, MAX_NAMES = 32, 64
"""They travel with the command that starts the gateway."""

CLIENT_NAME = r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}"

_CORE, _CLIENT, _RESTART = CoreSettings(), ClientSettings(), RestartSettings()
_LAUNCH, _HOST = LaunchSettings(), GroupHost()
_MODEL = ModelSettings(name=ModelName(""), launch=_LAUNCH)

OnPage = tuple[str, str] | None


def key(default: Any, does: str, *, page: OnPage = None, **others: Any) -> Any:
    """Declare a key.

    Args:
        default: its value if a file leaves it out, as a file would write it.
        does: says what the key does, in a phrase that fits behind it in the example file.
        page: its label in the settings of a model on the web page, and a sentence or two that need
            no other knowledge; None if it is not there.
        others: further arguments of pydantic's `Field`.
    """
    extra: dict[str, Any] = {"page": page}
    return Field(default, title=does, json_schema_extra=extra, **others)


def table(does: str, takes: str = "a table", **schema: Any) -> Any:
    """Declare a key that takes a table, which is empty if a file leaves it out."""
    return Field(default_factory=dict, title=does, description=takes, json_schema_extra=schema)


def takes(field: FieldInfo) -> str:
    """Return what a key takes, as a noun phrase."""
    if get_origin(field.annotation) is not Literal:
        return field.description or ""
    *others, last = (json.dumps(word) for word in get_args(field.annotation) if word)
    return f"{', '.join(others)} or {last}"


def _for_editors(schema: dict[str, Any], shown: type[BaseModel]) -> None:
    """Say in a table's schema what each key does and takes; TOML has no null."""
    schema.pop("title", None)
    for name, field in shown.model_fields.items():
        entry = schema["properties"][name]
        if entry.get("default", "") is None:
            del entry["default"]
            for choice in entry.pop("anyOf"):
                entry |= choice if choice != {"type": "null"} else {}
        for ours in ("title", "page"):
            entry.pop(ours, None)
        does = field.title or name
        entry["description"] = f"{does[:1].upper()}{does[1:]}. Takes {takes(field)}."


class Table(BaseModel):
    """A table of the file: it takes no unknown keys, and converts nothing silently."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        defer_build=True,
        json_schema_extra=_for_editors,
    )


class SupervisorTable(Table):
    """`[supervisor]`."""

    runtime_dir: Folder = key(
        DEFAULT_RUNTIME_DIR, "created with mode 0700; holds the sockets and the lock"
    )
    log_dir: Folder = key(DEFAULT_LOG_DIR, "one log for each model, and the daemon's own")
    memory_budget: SizeAboveZeroOrAuto = key("auto", "what `mlxsup plan` fits all models into")
    max_queue: CountFromOne = key(_CORE.max_queue, "waiting requests, over all models")
    max_queue_per_client: CountFromOne = key(
        _CORE.max_queue_per_client, "waiting requests of one client"
    )
    max_queue_bytes: SizeAboveZero = key(
        _CORE.max_queue_bytes, "the bodies of all open requests together"
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        _CORE.log_level, "the lowest level that is logged"
    )
    log_format: Literal["text", "json"] = key(
        "text", 'how mlxsup.log is written; "json": an object on each line'
    )
    prevent_sleep: Literal["off", "busy"] = key(
        "off", '"busy": a Mac stays awake while something runs or loads'
    )
    drain_timeout_s: Duration = key(
        _CORE.drain_timeout_s, "how long an unload, a restart or `stop` waits for running requests"
    )
    queue_timeout_s: Duration = key(
        _CORE.queue_timeout_s, "how long a request may wait; requests can override it"
    )
    first_token_timeout_s: Duration = key(
        _CORE.first_token_timeout_s,
        "time limit for the first token; 0: none; requests can override it",
    )
    aging_s: Duration = key(
        _CORE.aging_s, "a request moves up one class each time it has waited this long"
    )
    min_run_s: Duration = key(
        _CORE.min_run_s, "a batch answer runs this long before it may lose its row"
    )
    max_parallel_prefills: CountOrAuto = key(
        "auto", "models on one backend that read long prompts at the same time"
    )
    parallel_loads: CountFromOne = key(_CORE.parallel_loads, "models that load at the same time")
    warm_workers: WarmWorkers = key("auto", "processes that have imported MLX and wait for a load")
    min_residency_s: Duration = key(
        _CORE.min_residency_s, "how long a model that has loaded stays, unless it is idle"
    )
    swap: Flag = key(
        _CORE.swap, "models that do not fit together take turns; false: refuse instead"
    )
    swap_after_s: Duration = key(
        _CORE.swap_after_s, "how long a model waits for memory before a busy one makes room"
    )


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = key(
        DEFAULT_LISTEN, "where the HTTP gateway listens", description=ADDRESS_EXPECTED
    )
    names: dict[str, str] = key(
        {},
        "names that programs use, and the models they mean",
        max_length=MAX_NAMES,
        description=f"a table of at most {MAX_NAMES} names, each with the name of a model",
    )
    hosts: list[Host] = key(
        [],
        "further names in the `host` header, as a proxy passes them on",
        max_length=MAX_SITES,
        description=f"an array of at most {MAX_SITES} names, without schemes, ports and paths, such"
        ' as "ai.example"',
    )
    origins: list[Origin] = key(
        [],
        "pages of other sites that may ask (CORS)",
        max_length=MAX_SITES,
        description=f"an array of at most {MAX_SITES} schemes and names, with a port if it is not"
        ' the usual one and no path, such as "https://chat.example"',
    )
    keys: Literal["auto", "required"] = key("auto", "whether each request needs an API key")
    unknown_fields: Literal["warn", "refuse"] = key(
        "warn", "what becomes of a request with a field that is not known"
    )
    auto_add: Flag = key(False, "whether a request for a model that is not served adds it")


class ClientTable(Table):
    """`[clients.NAME]`."""

    weight: float = key(
        _CLIENT.weight,
        "its share of a model's time while other clients wait, too",
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description=f"a number from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
    )
    priority: Class = key(_CLIENT.priority.value, "the class of its requests that name none")
    max_priority: Class = key(
        _CLIENT.max_priority.value, "the highest class that its requests may name"
    )
    max_queue: Count = key(_CLIENT.max_queue, "its waiting requests; 0: max_queue_per_client")
    max_running: Count = key(
        _CLIENT.max_running, "its requests that run at once, over all models; 0: no limit"
    )


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: Count = key(
        _RESTART.max_restarts, "restarts within window_s; one more crash makes the model FAILED"
    )
    window_s: DurationAboveZero = key(_RESTART.window_s, "the time in which restarts are counted")
    stable_s: Duration = key(_RESTART.stable_s, "once READY for this long, the delay is reset")
    backoff_initial_s: Duration = key(
        _RESTART.backoff_initial_s, "the delay after the first, immediate restart"
    )
    backoff_max_s: Duration = key(_RESTART.backoff_max_s, "the delay doubles up to this")


class HostTable(Table):
    """`[[models.NAME.hosts]]`."""

    address: str = key(
        _HOST.address,
        "the address of this host on the link between the hosts",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$",
        description="an IPv4 address or a name, without a port",
    )
    ssh: str = key(
        _HOST.ssh,
        "what `ssh` calls the host; empty: this machine",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.@:-]{0,252})?$",
        description="a name that ssh knows",
    )
    python: str = key(
        _HOST.python,
        "the interpreter there that has mlxsup; empty: as on this machine",
        pattern=r"^[^\x00]*$",
        description="the path of a program",
    )
    path: str = key(
        _HOST.path,
        "the model folder there; empty: as on this machine",
        pattern=r"^[^\x00]*$",
        description="a folder",
    )


def _number(number: NumberParameter, default: float | None, does: str, page: OnPage = None) -> Any:
    """Declare a parameter of requests, with the range it has there."""
    kind = int if number.is_integer else float
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    declared = key(default, does, page=page, description=number.expected, **limits)
    return kind if default is not None else kind | None, declared


if TYPE_CHECKING:  # a checker of types does not see what `create_model` makes
    SamplingTable = Table
    PresetTable = Table
else:
    SamplingTable = create_model(
        "SamplingTable",
        __base__=Table,
        __doc__="`[models.NAME.sampling]`: the parameters of requests that leave them out.",
        **{
            name: _number(n, n.default, n.says, (name.replace("_", " ").capitalize(), f"{n.says}."))
            for name, n in SAMPLING.items()
        },
    )
    PresetTable = create_model(
        "PresetTable",
        __base__=Table,
        __doc__="`[models.NAME.presets.NAME]`: the parameters of requests that leave them out.",
        **{name: _number(n, None, n.says) for name, n in SAMPLING.items()},
        max_tokens=_number(
            replace(NUMBERS["max_tokens"], low=1), None, "how many tokens to generate at most"
        ),
        chat_template_kwargs=(
            JsonTable,
            table(
                "further arguments for the chat template, such as enable_thinking",
                "a table of texts, numbers, truth values and tables, without dates",
            ),
        ),
    )


class ModelTable(Table):
    """`[models.NAME]`, and `[defaults]`."""

    path: Folder | None = key(None, "a model folder in mlx-lm's format", description="a folder")
    repo: Repository | None = key(
        None, "instead of path: in the Hugging Face cache", description=REPOSITORY_EXPECTED
    )
    revision: Revision = key(DEFAULT_REVISION, "with repo: its branch, tag or commit")
    aliases: list[Alias] = key(
        [],
        "other names for it, in requests and commands",
        page=("Other names", "Programs can use these names, too. Put commas between them."),
        description="an array of names of 1 to 128 of the characters A-Z a-z 0-9 . _ / -, the first"
        " a letter or digit",
    )
    preload: Flag = key(
        _MODEL.preload,
        "load at startup; otherwise on the first request",
        page=("Load when mlxsup starts", "Otherwise the first request loads it."),
    )
    pinned: Flag = key(
        _MODEL.pinned,
        "never evicted; its memory is reserved even while it is not loaded",
        page=("Always keep room for it", "Other models never get the memory that it needs."),
    )
    max_concurrency: int = key(
        _LAUNCH.max_concurrency,
        "requests that run at the same time, as rows of one batch",
        page=(
            "Answers at the same time",
            "Further requests wait. More at a time need more memory.",
        ),
        ge=1,
        le=MAX_CONCURRENCY,
        description=f"an integer from 1 to {MAX_CONCURRENCY}",
    )
    idle_unload_s: Duration = key(
        _MODEL.idle_unload_s,
        "unload after this long without a request; 0: never",
        page=(
            "Keep loaded for",
            "Time without a request, such as 30m or 2h. 0: until you unload it.",
        ),
    )
    load_stall_timeout_s: DurationAboveZero = key(
        _MODEL.load_stall_timeout_s, "a load is ended after this long without progress"
    )
    step_timeout_s: DurationAboveZero = key(
        _LAUNCH.step_timeout_s, "time limit for one step; a chunk of a prompt takes at most a tenth"
    )
    decode_stall_target_ms: CountFromOne = key(
        _LAUNCH.decode_stall_target_ms,
        "how long a chunk of a new prompt may hold up running answers",
    )
    decode_share: DecodeShare = key(
        _LAUNCH.decode_share, "running answers keep this share of the time beside a new prompt"
    )
    context_length: Count = key(
        _LAUNCH.context_length,
        "tokens of prompt and answer together; 0: the model's own limit",
        page=("Context length, in tokens", "Prompt and answer together. 0: as much as it can."),
    )
    deterministic: Flag = key(
        _LAUNCH.deterministic, "read prompts in chunks of a fixed size, and never from a cache"
    )
    memory: SizeOrAuto = key(
        "auto",
        "how much to reserve, and the limit for its rows",
        page=("Memory", "The most it may use, such as 6GiB. auto: mlxsup decides."),
    )
    cache_limit: SizeOrAuto = key("auto", "how much memory MLX may keep for reuse")
    prefix_cache: SizeOrAuto = key(
        "auto", "memory for the prefixes of earlier prompts, to be reused; 0: none"
    )
    wired: SizeAutoOrOff = key(
        "off", 'memory that cannot be paged out; "auto": the size of the weights'
    )
    pooling: Literal["", "mean", "cls", "last", "yes_no"] = key(
        _LAUNCH.pooling, "make embeddings with any model: mean, cls or last"
    )
    drafts: Drafts = key(
        _LAUNCH.drafts,
        '"ngram" or the folder of a draft model: guess tokens',
        description='"off", "ngram" or the folder of a draft model, with a slash such as "./draft"',
    )
    draft_tokens: int = key(
        _LAUNCH.draft_tokens,
        "how many tokens an answer guesses at once, at most",
        ge=1,
        le=MOST_DRAFT_TOKENS,
        description=f"an integer from 1 to {MOST_DRAFT_TOKENS}",
    )
    hosts: list[HostTable] = key(
        [],
        "the hosts that serve the model together, this one first",
        max_length=MAX_HOSTS,
        description=f"a table for each of at most {MAX_HOSTS} hosts, [[models.NAME.hosts]], this"
        " machine first",
    )
    min_hosts: Count = key(
        _LAUNCH.min_hosts, "how many of the hosts are enough, this one included; 0: all"
    )
    parallel: Literal["auto", "tensor", "pipeline"] = key(
        _LAUNCH.parallel, "with hosts: how they divide the model"
    )
    engine: Literal["mlx", "fake"] = key(
        _LAUNCH.engine, '"mlx", or "fake", which answers without a model, for tests'
    )
    fake: JsonTable = table(
        'options of the fake engine; only with engine = "fake"',
        "a table of texts, numbers, truth values and tables, without dates",
    )
    restart: RestartTable = table("how often and how soon a crashed worker is started again")
    sampling: SamplingTable = table("the parameters of requests that leave them out")
    adapters: dict[str, Folder] = Field(
        default_factory=dict,
        title="LoRA adapters: NAME:ADAPTER is the model with this one",
        max_length=MAX_ADAPTERS,
        description=f"a table of at most {MAX_ADAPTERS} names, each with a folder",
    )
    presets: dict[str, PresetTable] = table(
        "over HTTP, NAME:PRESET is the model with these parameters",
        "a table for each preset, [models.NAME.presets.PRESET]",
    )


class FileTable(Table):
    """The whole file."""

    supervisor: SupervisorTable = table("the daemon itself")
    gateway: GatewayTable | None = Field(
        None, title="the HTTP gateway; without this table there is none", description="a table"
    )
    clients: dict[str, ClientTable] = table(
        'clients by name; "*" is for all that have no entry',
        "a table for each client, [clients.NAME]",
        propertyNames={"pattern": rf"^(\{ANYONE}|{CLIENT_NAME})$"},
    )
    defaults: ModelTable = table("defaults for all models: any key of [models.NAME]")
    models: dict[str, ModelTable] = table(
        "the models to serve, by name",
        "a table for each model, [models.NAME]",
        propertyNames={"pattern": f"^{MODEL_NAME.pattern}$"},
    )


SECTIONS: dict[str, type[Table]] = {
    "[supervisor]": SupervisorTable,
    "[gateway]": GatewayTable,
    "[clients.NAME]": ClientTable,
    "[models.NAME]": ModelTable,
    "[[models.NAME.hosts]]": HostTable,
    "[models.NAME.restart]": RestartTable,
    "[models.NAME.sampling]": SamplingTable,
    "[models.NAME.presets.NAME]": PresetTable,
}
"""The tables with keys of their own, as a file begins them."""


# ---------------------------------------------------------------- where a key is


def table_around(where: Place) -> tuple[type[Table], Place]:
    """Return the innermost table around a place, and the way from there: one of its keys, and what
    is inside the value of that key, if the place is."""
    table: type[Table] = FileTable
    while (field := table.model_fields.get(where[0])) and (inner := table_in(field)):
        way = 2 if get_origin(field.annotation) in (dict, list) else 1
        if len(where) <= way:
            break
        table, where = inner, where[way:]
    return table, where


def table_in(field: FieldInfo) -> type[Table] | None:
    """Return the table that a key takes, or takes one of for each name; None if it takes none."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def suggestion(table: type[Table], key: str) -> str:
    """Return what was probably meant by a key that a table does not have."""
    for heading, other in SECTIONS.items():
        if key in other.model_fields:
            also = " or [defaults]" if other is ModelTable else ""
            return f"; it belongs to {heading}{also}"
    known = list(table.model_fields)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; the known ones are {', '.join(known)}"
