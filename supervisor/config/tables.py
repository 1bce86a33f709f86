"""The tables of the configuration file: their keys, what each takes, and the defaults.

A default comes from the settings that the key becomes, so that no number is written twice. The
description of a field is what an error says was expected; words speak for themselves. Its title
says what the key does; `tools/reference.py` prints titles for people, and for editors as the schema
of the file.
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

from ..core.settings import (
    ANYONE,
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)
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


def key(
    default: Any, does: str, more: str = "", *, unit: str = "", page: OnPage = None, **others: Any
) -> Any:
    """Declare a key.

    Args:
        default: its value if a file leaves it out, as a file would write it.
        does: says what the key does, in a phrase that fits behind it in the example file.
        more: is added in the reference.
        unit: of its values, if neither its name nor its type says so.
        page: its label in the settings of a model on the web page, and a sentence or two that need
            no other knowledge; None if it is not there.
        others: further arguments of pydantic's `Field`.
    """
    extra: dict[str, Any] = {"more": more, "unit": unit, "page": page}
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
        for ours in ("title", "more", "unit", "page"):
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
        DEFAULT_RUNTIME_DIR,
        "created with mode 0700; holds the sockets and the lock",
        "; refused with any other mode",
    )
    log_dir: Folder = key(
        DEFAULT_LOG_DIR,
        "one log for each model, and the daemon's own",
        "; used by one daemon only. Without this key: `logs` in `runtime_dir`, if `runtime_dir` is"
        " not the default",
    )
    memory_budget: SizeAboveZeroOrAuto = key(
        "auto",
        "what `mlxsup plan` fits all models into",
        '; not more than the machine has. `"auto"`: see [memory](#what-fits-into-memory)',
    )
    max_queue: CountFromOne = key(
        _CORE.max_queue,
        "waiting requests, over all models",
        "; more are refused with `overloaded`. A full queue still takes requests for a"
        " model that has less than its equal share of it",
        unit="requests",
    )
    max_queue_per_client: CountFromOne = key(
        _CORE.max_queue_per_client,
        "waiting requests of one client",
        ", unless its own entry says otherwise; more are refused with `overloaded`",
        unit="requests",
    )
    max_queue_bytes: SizeAboveZero = key(
        _CORE.max_queue_bytes,
        "the bodies of all open requests together",
        "; beyond it, requests are answered `overloaded`",
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        _CORE.log_level,
        "the lowest level that is logged",
        ": `debug`, `info`, `warning` or `error`; applies to workers, too",
    )
    log_format: Literal["text", "json"] = key(
        "text",
        'how mlxsup.log is written; "json": an object on each line',
        "; what workers print stays as it is",
    )
    prevent_sleep: Literal["off", "busy"] = key(
        "off",
        '"busy": a Mac stays awake while something runs or loads',
        ": requests that are not paused, loads and downloads. It sleeps again after its own idle"
        " time. Elsewhere it has no effect, and a line of `mlxsup.log` says so",
    )
    drain_timeout_s: Duration = key(
        _CORE.drain_timeout_s,
        "how long an unload, a restart or `stop` waits for running requests",
    )
    queue_timeout_s: Duration = key(
        _CORE.queue_timeout_s,
        "how long a request may wait; requests can override it",
        "; 0: no limit. An interrupted answer counts as started",
    )
    first_token_timeout_s: Duration = key(
        _CORE.first_token_timeout_s,
        "time limit for the first token; 0: none; requests can override it",
    )
    aging_s: Duration = key(
        _CORE.aging_s,
        "a request moves up one class each time it has waited this long",
        "; 0: never",
    )
    min_run_s: Duration = key(
        _CORE.min_run_s,
        "a batch answer runs this long before it may lose its row",
        " to an interactive request, from its first new token on",
    )
    max_parallel_prefills: CountOrAuto = key(
        "auto",
        "models on one backend that read long prompts at the same time",
        '; more of them take turns, chunk by chunk. `"auto"`: one on a GPU, any number on a CPU',
        unit="models",
    )
    parallel_loads: CountFromOne = key(
        _CORE.parallel_loads,
        "models that load at the same time",
        ", each with its memory reserved before. A restart after a crash only waits for other such"
        " restarts, of which there may be as many again",
        unit="models",
    )
    warm_workers: WarmWorkers = key(
        "auto",
        "processes that have imported MLX and wait for a load",
        ', which takes one over and so skips the imports. `"auto"`: one, as long as a tenth of the'
        " memory budget is free beside it; see [warm pool](#warm-pool)",
        unit="processes",
    )
    min_residency_s: Duration = key(
        _CORE.min_residency_s,
        "how long a model that has loaded stays, unless it is idle",
        "; three times as long as its load took if that is longer. One that has been idle for as"
        " long as its load took may be evicted before",
    )
    swap: Flag = key(
        _CORE.swap,
        "models that do not fit together take turns; false: refuse instead",
        ". A busy model whose turn is over makes room; its requests wait, and continue where they"
        " stood",
    )
    swap_after_s: Duration = key(
        _CORE.swap_after_s,
        "how long a model waits for memory before a busy one makes room",
        ", or, with `swap` off, before what waits for it is refused",
    )


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = key(
        DEFAULT_LISTEN,
        "where the HTTP gateway listens",
        "; port 0: any that is free. An address that other machines reach needs"
        " [keys](http-api.md#keys)",
        unit="address",
        description=ADDRESS_EXPECTED,
    )
    names: dict[str, str] = key(
        {},
        "names that programs use, and the models they mean",
        '; `*` stands for anything: `"claude-*" = "qwen"`. The first that fits counts, after the'
        " models' own names, aliases and presets",
        max_length=MAX_NAMES,
        description=f"a table of at most {MAX_NAMES} names, each with the name of a model",
    )
    hosts: list[Host] = key(
        [],
        "further names in the `host` header, as a proxy passes them on",
        ': `hosts = ["ai.example"]`; see [behind a proxy](http-api.md#behind-a-proxy). Those that'
        " are not of this machine need [keys](http-api.md#keys)",
        unit="names",
        max_length=MAX_SITES,
        description=f"an array of at most {MAX_SITES} names, without schemes, ports and paths, such"
        ' as "ai.example"',
    )
    origins: list[Origin] = key(
        [],
        "pages of other sites that may ask (CORS)",
        ': `origins = ["https://chat.example"]`; those that are not of this machine need'
        " [keys](http-api.md#pages-of-other-sites)",
        unit="origins",
        max_length=MAX_SITES,
        description=f"an array of at most {MAX_SITES} schemes and names, with a port if it is not"
        ' the usual one and no path, such as "https://chat.example"',
    )
    keys: Literal["auto", "required"] = key(
        "auto",
        "whether each request needs an API key",
        ". `auto`: from the first key on, and where other machines reach the gateway; `required`:"
        " always; see [keys](http-api.md#keys)",
    )
    unknown_fields: Literal["warn", "refuse"] = key(
        "warn",
        "what becomes of a request with a field that is not known",
        ". `warn`: it is answered, and the header `x-mlxsup-ignored` names the field; `refuse`:"
        " it gets 400",
    )
    auto_add: Flag = key(
        False,
        "whether a request for a model that is not served adds it",
        ": OWNER/NAME is downloaded, and a model of this machine served, from then on. Where keys"
        " are needed, operators' requests alone do",
    )


class ClientTable(Table):
    """`[clients.NAME]`."""

    weight: float = key(
        _CLIENT.weight,
        "its share of a model's time while other clients wait, too",
        f"; with 2 it gets twice as much as a client with 1; from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
        unit="factor",
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description=f"a number from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
    )
    priority: Class = key(_CLIENT.priority.value, "the class of its requests that name none")
    max_priority: Class = key(
        _CLIENT.max_priority.value,
        "the highest class that its requests may name",
        "; others are refused. Below `normal`, set `priority` too",
    )
    max_queue: Count = key(
        _CLIENT.max_queue,
        "its waiting requests; 0: max_queue_per_client",
        "; more are refused with `overloaded`",
        unit="requests",
    )
    max_running: Count = key(
        _CLIENT.max_running,
        "its requests that run at once, over all models; 0: no limit",
        "; more of them wait, and those of others start before them",
        unit="requests",
    )


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: Count = key(
        _RESTART.max_restarts,
        "restarts within window_s; one more crash makes the model FAILED",
        unit="restarts",
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
        "; a private link, because what the ranks exchange is not encrypted",
        unit="address",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$",
        description="an IPv4 address or a name, without a port",
    )
    ssh: str = key(
        _HOST.ssh,
        "what `ssh` calls the host; empty: this machine",
        ". User, key and jumps are those of your configuration of ssh, which must ask for nothing",
        unit="name",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.@:-]{0,252})?$",
        description="a name that ssh knows",
    )
    python: str = key(
        _HOST.python,
        "the interpreter there that has mlxsup; empty: as on this machine",
        unit="file",
        pattern=r"^[^\x00]*$",
        description="the path of a program",
    )
    path: str = key(
        _HOST.path,
        "the model folder there; empty: as on this machine",
        "; relative paths are relative to the home folder there",
        unit="folder",
        pattern=r"^[^\x00]*$",
        description="a folder",
    )


def _number(
    number: NumberParameter, default: float | None, does: str, unit: str, page: OnPage = None
) -> Any:
    """Declare a parameter of requests, with the range it has there."""
    kind = int if number.is_integer else float
    limits: dict[str, Any] = {"gt" if number.is_low_open else "ge": number.low, "le": number.high}
    declared = key(default, does, unit=unit, page=page, description=number.expected, **limits)
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
            name: _number(
                n, n.default, n.says, n.unit, (name.replace("_", " ").capitalize(), f"{n.says}.")
            )
            for name, n in SAMPLING.items()
        },
    )
    PresetTable = create_model(
        "PresetTable",
        __base__=Table,
        __doc__="`[models.NAME.presets.NAME]`: the parameters of requests that leave them out.",
        **{name: _number(n, None, n.says, n.unit or "tokens") for name, n in SAMPLING.items()},
        max_tokens=_number(
            replace(NUMBERS["max_tokens"], low=1),
            None,
            "how many tokens to generate at most",
            "tokens",
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

    path: Folder | None = key(
        None,
        "a model folder in mlx-lm's format",
        "; this or `repo` is required",
        description="a folder",
    )
    repo: Repository | None = key(
        None,
        "instead of path: in the Hugging Face cache",
        ", the repository `OWNER/NAME`. Its files are used where they are, and those that are"
        " missing are [downloaded](#downloads) when it is loaded; the cache is where"
        " `HF_HUB_CACHE`, `HF_HOME` or `XDG_CACHE_HOME` says, or `~/.cache/huggingface/hub`",
        unit="name",
        description=REPOSITORY_EXPECTED,
    )
    revision: Revision = key(
        DEFAULT_REVISION,
        "with repo: its branch, tag or commit",
        "; which commit a branch means is looked up at the start and at a reload",
        unit="name",
    )
    aliases: list[Alias] = key(
        [],
        "other names for it, in requests and commands",
        "; the status shows it under its name",
        unit="names",
        page=("Other names", "Programs can use these names, too. Put commas between them."),
        description="an array of names of 1 to 128 of the characters A-Z a-z 0-9 . _ / -, the first"
        " a letter or digit",
    )
    preload: Flag = key(
        _MODEL.preload,
        "load at startup; otherwise on the first request",
        ". At startup nothing is evicted: what does not fit into `memory_budget` stays PENDING",
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
        f"; up to {MAX_CONCURRENCY}",
        unit="requests",
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
        _MODEL.load_stall_timeout_s,
        "a load is ended after this long without progress",
        ", which counts as a crash",
    )
    step_timeout_s: DurationAboveZero = key(
        _LAUNCH.step_timeout_s,
        "time limit for one step; a chunk of a prompt takes at most a tenth",
        ", and preparing one prompt may take ten times as long",
    )
    decode_stall_target_ms: CountFromOne = key(
        _LAUNCH.decode_stall_target_ms,
        "how long a chunk of a new prompt may hold up running answers",
        unit="milliseconds",
    )
    decode_share: DecodeShare = key(
        _LAUNCH.decode_share,
        "running answers keep this share of the time beside a new prompt",
    )
    context_length: Count = key(
        _LAUNCH.context_length,
        "tokens of prompt and answer together; 0: the model's own limit",
        ", or 4,096 with a warning if config.json declares none. It is capped at what the model"
        " declares, with a warning",
        unit="tokens",
        page=("Context length, in tokens", "Prompt and answer together. 0: as much as it can."),
    )
    deterministic: Flag = key(
        _LAUNCH.deterministic,
        "read prompts in chunks of a fixed size, and never from a cache",
    )
    memory: SizeOrAuto = key(
        "auto",
        "how much to reserve, and the limit for its rows",
        ", instead of the estimate. `mlxsup plan` counts this much, and what the weights and the"
        " process leave of it is the limit of its rows; above it, MLX frees memory that it keeps"
        ' for reuse. `"auto"`: MLX\'s own limit, and what the model needs. Less than the'
        " weights, the process and a request of 256 tokens take: exit code 78 if the files show it,"
        " otherwise FAILED after the load; more than 0.8 of it in use before the first request: a"
        " warning",
        page=("Memory", "The most it may use, such as 6GiB. auto: mlxsup decides."),
    )
    cache_limit: SizeOrAuto = key(
        "auto",
        "how much memory MLX may keep for reuse",
        '; `"auto"`: on a GPU 8 GiB, or an eighth of its memory if that is less; on a CPU MLX\'s'
        " own limit. An idle worker frees this memory after three seconds in any case",
    )
    prefix_cache: SizeOrAuto = key(
        "auto",
        "memory for the prefixes of earlier prompts, to be reused; 0: none",
        '; `"auto"`: a tenth of the memory that is free after the load, or as much as a prompt of'
        " the whole context takes if that is more, but never more than half of what is free",
    )
    wired: SizeAutoOrOff = key(
        "off", 'memory that cannot be paged out; "auto": the size of the weights'
    )
    pooling: Literal["", "mean", "cls", "last", "yes_no"] = key(
        _LAUNCH.pooling,
        "make embeddings with any model: mean, cls or last",
        " of a text's vectors; `yes_no` ranks documents by whether the model would say yes or no,"
        " as Qwen3-Reranker; empty: as the files of the model say",
    )
    drafts: Drafts = key(
        _LAUNCH.drafts,
        '"ngram" or the folder of a draft model: guess tokens',
        ", which one pass reads, where that is faster: those that followed the same text before, or"
        " what a smaller model with the same tokenizer says. Its folder has a slash. Answers stay"
        " the same. `deterministic` models and those that embed do not guess, as a warning says",
        unit="folder",
        description='"off", "ngram" or the folder of a draft model, with a slash such as "./draft"',
    )
    draft_tokens: int = key(
        _LAUNCH.draft_tokens,
        "how many tokens an answer guesses at once, at most",
        unit="tokens",
        ge=1,
        le=MOST_DRAFT_TOKENS,
        description=f"an integer from 1 to {MOST_DRAFT_TOKENS}",
    )
    hosts: list[HostTable] = key(
        [],
        "the hosts that serve the model together, this one first",
        "; see [groups](groups.md)",
        unit="tables",
        max_length=MAX_HOSTS,
        description=f"a table for each of at most {MAX_HOSTS} hosts, [[models.NAME.hosts]], this"
        " machine first",
    )
    min_hosts: Count = key(
        _LAUNCH.min_hosts,
        "how many of the hosts are enough, this one included; 0: all",
        ". Those that cannot be reached are then left out until the next load, if the model fits"
        " into the memory of the others",
        unit="hosts",
    )
    parallel: Literal["auto", "tensor", "pipeline"] = key(
        _LAUNCH.parallel,
        "with hosts: how they divide the model",
        ". `tensor`: each layer among all of them; `pipeline`: some of the layers for each; `auto`:"
        " `pipeline` for the types of models that can be one, else `tensor`",
    )
    engine: Literal["mlx", "fake"] = key(
        _LAUNCH.engine,
        '"mlx", or "fake", which answers without a model, for tests',
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
