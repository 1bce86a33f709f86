"""The tables of the configuration file: their keys, what each takes, and the defaults.

A default comes from the settings that the key becomes, so that no number is written twice.
`tools/reference.py` prints the keys for people, and for editors as the schema of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mlxsup.protocol.folders import DEFAULT_LISTEN, DEFAULT_LOG_DIR, DEFAULT_RUNTIME_DIR
from mlxsup.protocol.gateway import ADDRESS_EXPECTED
from mlxsup.protocol.ids import DEFAULT_REVISION, ModelName
from mlxsup.protocol.launch import MOST_DRAFT_TOKENS, GroupHost, LaunchSettings
from mlxsup.protocol.parameters import NUMBERS, SAMPLING, NumberParameter

from ..core.settings import (
    ANYONE,
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)
from .lines import MODEL_NAME, Place
from .values import (
    ALIAS,
    CLASS,
    COUNT,
    COUNT_FROM_ONE,
    COUNT_OR_AUTO,
    DECODE_SHARE,
    DRAFTS,
    DURATION,
    DURATION_ABOVE_ZERO,
    FLAG,
    FOLDER,
    HOST,
    JSON_TABLE,
    ORIGIN,
    REPOSITORY,
    REVISION,
    SIZE_ABOVE_ZERO,
    SIZE_ABOVE_ZERO_OR_AUTO,
    SIZE_AUTO_OR_OFF,
    SIZE_OR_AUTO,
    WARM_WORKERS,
    Kind,
    choice,
    number,
    text,
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


class Key:
    """A key of a table: what it takes and does.

    Attributes:
        kind: of its value, or the table that it takes.
        default: its value if a file leaves it out, as a file would write it.
        does: says what the key does, in a phrase that fits behind it in the example file.
        more: is added in the reference.
        takes: what an error says was expected.
        many: `list` or `dict` if it takes an array, or a table of names, of its kind.
        most: how many of them at most.
        unit: of its values, if neither its name nor its type says so.
        page: its label in the settings of a model on the web page, and a sentence or two that need
            no other knowledge; None if it is not there.
        names: a pattern for the names of `many`, which editors check.
    """

    def __init__(
        self,
        kind: Kind | type[Table],
        default: Any,
        does: str,
        more: str = "",
        *,
        takes: str = "",
        many: type[list[Any]] | type[dict[str, Any]] | None = None,
        most: int | None = None,
        unit: str = "",
        page: OnPage = None,
        names: str = "",
    ) -> None:
        self.kind = kind
        self.default = default
        self.does = does
        self.more = more
        self.takes = takes or (kind.takes if isinstance(kind, Kind) else "a table")
        self.many = many
        self.most = most
        self.unit = unit
        self.page = page
        self.names = names

    @property
    def table(self) -> type[Table] | None:
        """Return the table that it takes, or takes one of for each name; None if it takes none."""
        return None if isinstance(self.kind, Kind) else self.kind

    def parts(self, value: Any) -> dict[Place, Any] | None:
        """Return what must be of its kind, by the way into the value; None: the value is no array
        or no table where it must be one, or has too many entries."""
        if self.many is None:
            return {(): value}
        if not isinstance(value, self.many) or len(value) > (self.most or len(value)):
            return None
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {(str(name),): part for name, part in entries}

    def read(self, value: Any) -> Any:
        """Return what a right value means."""
        if value is None:
            return None
        read = self.kind.read if isinstance(self.kind, Kind) else self.kind
        if self.many is None:
            return read(value)
        if isinstance(value, dict):
            return {name: read(part) for name, part in value.items()}
        return list(map(read, value))


def key(kind: Kind | type[Table], default: Any, does: str, more: str = "", **others: Any) -> Any:
    """Declare a `Key`; for a checker of types it is what the tables of a file have there."""
    return Key(kind, default, does, more, **others)


class Table:
    """A table of the file, all of whose keys are right: their values are its attributes.

    Attributes:
        declared: the keys that a file may have.
        given: the values of those that it has.
    """

    declared: ClassVar[dict[str, Key]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Key)}
        cls.declared = {**cls.declared, **own}

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.given = {name: self.declared[name].read(value) for name, value in values.items()}
        for name, key in self.declared.items():
            value = self.given[name] if name in values else key.read(key.default)
            setattr(self, name, value)


class SupervisorTable(Table):
    """`[supervisor]`."""

    runtime_dir: str = key(
        FOLDER,
        DEFAULT_RUNTIME_DIR,
        "created with mode 0700; holds the sockets and the lock",
        "; refused with any other mode",
    )
    log_dir: str = key(
        FOLDER,
        DEFAULT_LOG_DIR,
        "one log for each model, and the daemon's own",
        "; used by one daemon only. Without this key: `logs` in `runtime_dir`, if `runtime_dir` is"
        " not the default",
    )
    memory_budget: int | None = key(
        SIZE_ABOVE_ZERO_OR_AUTO,
        "auto",
        "what `mlxsup plan` fits all models into",
        '; not more than the machine has. `"auto"`: see [memory](#what-fits-into-memory)',
    )
    max_queue: int = key(
        COUNT_FROM_ONE,
        _CORE.max_queue,
        "waiting requests, over all models",
        "; more are refused with `overloaded`. A full queue still takes requests for a"
        " model that has less than its equal share of it",
        unit="requests",
    )
    max_queue_per_client: int = key(
        COUNT_FROM_ONE,
        _CORE.max_queue_per_client,
        "waiting requests of one client",
        ", unless its own entry says otherwise; more are refused with `overloaded`",
        unit="requests",
    )
    max_queue_bytes: int = key(
        SIZE_ABOVE_ZERO,
        _CORE.max_queue_bytes,
        "the bodies of all open requests together",
        "; beyond it, requests are answered `overloaded`",
    )
    log_level: str = key(
        choice("debug", "info", "warning", "error"),
        _CORE.log_level,
        "the lowest level that is logged",
        ": `debug`, `info`, `warning` or `error`; applies to workers, too",
    )
    log_format: str = key(
        choice("text", "json"),
        "text",
        'how mlxsup.log is written; "json": an object on each line',
        "; what workers print stays as it is",
    )
    prevent_sleep: str = key(
        choice("off", "busy"),
        "off",
        '"busy": a Mac stays awake while something runs or loads',
        ": requests that are not paused, loads and downloads. It sleeps again after its own idle"
        " time. Elsewhere it has no effect, and a line of `mlxsup.log` says so",
        unit="word",
    )
    drain_timeout_s: float = key(
        DURATION,
        _CORE.drain_timeout_s,
        "how long an unload, a restart or `stop` waits for running requests",
    )
    queue_timeout_s: float = key(
        DURATION,
        _CORE.queue_timeout_s,
        "how long a request may wait; requests can override it",
        "; 0: no limit. An interrupted answer counts as started",
    )
    first_token_timeout_s: float = key(
        DURATION,
        _CORE.first_token_timeout_s,
        "time limit for the first token; 0: none; requests can override it",
    )
    aging_s: float = key(
        DURATION,
        _CORE.aging_s,
        "a request moves up one class each time it has waited this long",
        "; 0: never",
    )
    min_run_s: float = key(
        DURATION,
        _CORE.min_run_s,
        "a batch answer runs this long before it may lose its row",
        " to an interactive request, from its first new token on",
    )
    max_parallel_prefills: int | None = key(
        COUNT_OR_AUTO,
        "auto",
        "models on one backend that read long prompts at the same time",
        '; more of them take turns, chunk by chunk. `"auto"`: one on a GPU, any number on a CPU',
        unit="models",
    )
    parallel_loads: int = key(
        COUNT_FROM_ONE,
        _CORE.parallel_loads,
        "models that load at the same time",
        ", each with its memory reserved before. A restart after a crash only waits for other such"
        " restarts, of which there may be as many again",
        unit="models",
    )
    warm_workers: int | None = key(
        WARM_WORKERS,
        "auto",
        "processes that have imported MLX and wait for a load",
        ', which takes one over and so skips the imports. `"auto"`: one, as long as a tenth of the'
        " memory budget is free beside it; see [warm pool](#warm-pool)",
        unit="processes",
    )
    min_residency_s: float = key(
        DURATION,
        _CORE.min_residency_s,
        "how long a model that has loaded stays, unless it is idle",
        "; three times as long as its load took if that is longer. One that has been idle for as"
        " long as its load took may be evicted before",
    )
    swap: bool = key(
        FLAG,
        _CORE.swap,
        "models that do not fit together take turns; false: refuse instead",
        ". A busy model whose turn is over makes room; its requests wait, and continue where they"
        " stood",
    )
    swap_after_s: float = key(
        DURATION,
        _CORE.swap_after_s,
        "how long a model waits for memory before a busy one makes room",
        ", or, with `swap` off, before what waits for it is refused",
    )


class GatewayTable(Table):
    """`[gateway]`."""

    listen: str = key(
        text(ADDRESS_EXPECTED),
        DEFAULT_LISTEN,
        "where the HTTP gateway listens",
        "; port 0: any that is free. An address that other machines reach needs"
        " [keys](http-api.md#keys)",
        unit="address",
    )
    names: dict[str, str] = key(
        text("the name of a model"),
        {},
        "names that programs use, and the models they mean",
        '; `*` stands for anything: `"claude-*" = "qwen"`. The first that fits counts, after the'
        " models' own names, aliases and presets",
        many=dict,
        most=MAX_NAMES,
        takes=f"a table of at most {MAX_NAMES} names, each with the name of a model",
    )
    hosts: list[str] = key(
        HOST,
        [],
        "further names in the `host` header, as a proxy passes them on",
        ': `hosts = ["ai.example"]`; see [behind a proxy](http-api.md#behind-a-proxy). Those that'
        " are not of this machine need [keys](http-api.md#keys)",
        unit="names",
        many=list,
        most=MAX_SITES,
        takes=f"an array of at most {MAX_SITES} names, without schemes, ports and paths, such"
        ' as "ai.example"',
    )
    origins: list[str] = key(
        ORIGIN,
        [],
        "pages of other sites that may ask (CORS)",
        ': `origins = ["https://chat.example"]`; those that are not of this machine need'
        " [keys](http-api.md#pages-of-other-sites)",
        unit="origins",
        many=list,
        most=MAX_SITES,
        takes=f"an array of at most {MAX_SITES} schemes and names, with a port if it is not"
        ' the usual one and no path, such as "https://chat.example"',
    )
    keys: str = key(
        choice("auto", "required"),
        "auto",
        "whether each request needs an API key",
        ". `auto`: from the first key on, and where other machines reach the gateway; `required`:"
        " always; see [keys](http-api.md#keys)",
        unit="word",
    )
    unknown_fields: str = key(
        choice("warn", "refuse"),
        "warn",
        "what becomes of a request with a field that is not known",
        ". `warn`: it is answered, and the header `x-mlxsup-ignored` names the field; `refuse`:"
        " it gets 400",
        unit="word",
    )
    auto_add: bool = key(
        FLAG,
        False,
        "whether a request for a model that is not served adds it",
        ": OWNER/NAME is downloaded, and a model of this machine served, from then on. Where keys"
        " are needed, operators' requests alone do",
    )


class ClientTable(Table):
    """`[clients.NAME]`."""

    weight: float = key(
        number(
            float,
            f"a number from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
            minimum=MIN_WEIGHT,
            maximum=MAX_WEIGHT,
        ),
        _CLIENT.weight,
        "its share of a model's time while other clients wait, too",
        f"; with 2 it gets twice as much as a client with 1; from {MIN_WEIGHT} to {MAX_WEIGHT:,}",
        unit="factor",
    )
    priority: str = key(CLASS, _CLIENT.priority.value, "the class of its requests that name none")
    max_priority: str = key(
        CLASS,
        _CLIENT.max_priority.value,
        "the highest class that its requests may name",
        "; others are refused. Below `normal`, set `priority` too",
    )
    max_queue: int = key(
        COUNT,
        _CLIENT.max_queue,
        "its waiting requests; 0: max_queue_per_client",
        "; more are refused with `overloaded`",
        unit="requests",
    )
    max_running: int = key(
        COUNT,
        _CLIENT.max_running,
        "its requests that run at once, over all models; 0: no limit",
        "; more of them wait, and those of others start before them",
        unit="requests",
    )


class RestartTable(Table):
    """`[models.NAME.restart]`."""

    max_restarts: int = key(
        COUNT,
        _RESTART.max_restarts,
        "restarts within window_s; one more crash makes the model FAILED",
        unit="restarts",
    )
    window_s: float = key(
        DURATION_ABOVE_ZERO, _RESTART.window_s, "the time in which restarts are counted"
    )
    stable_s: float = key(
        DURATION, _RESTART.stable_s, "once READY for this long, the delay is reset"
    )
    backoff_initial_s: float = key(
        DURATION, _RESTART.backoff_initial_s, "the delay after the first, immediate restart"
    )
    backoff_max_s: float = key(DURATION, _RESTART.backoff_max_s, "the delay doubles up to this")


class HostTable(Table):
    """`[[models.NAME.hosts]]`."""

    address: str = key(
        text("an IPv4 address or a name, without a port", r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$"),
        _HOST.address,
        "the address of this host on the link between the hosts",
        "; a private link, because what the ranks exchange is not encrypted",
        unit="address",
    )
    ssh: str = key(
        text("a name that ssh knows", r"^([A-Za-z0-9_][A-Za-z0-9_.@:-]{0,252})?$"),
        _HOST.ssh,
        "what `ssh` calls the host; empty: this machine",
        ". User, key and jumps are those of your configuration of ssh, which must ask for nothing",
        unit="name",
    )
    python: str = key(
        text("the path of a program", r"^[^\x00]*$"),
        _HOST.python,
        "the interpreter there that has mlxsup; empty: as on this machine",
        unit="file",
    )
    path: str = key(
        text("a folder", r"^[^\x00]*$"),
        _HOST.path,
        "the model folder there; empty: as on this machine",
        "; relative paths are relative to the home folder there",
        unit="folder",
    )


def _parameter(one: NumberParameter) -> Kind:
    """Return the kind of a parameter of requests, with the range it has there."""
    low = {"exclusiveMinimum" if one.is_low_open else "minimum": one.low}
    return number(int if one.is_integer else float, one.expected, **low, maximum=one.high)


class SamplingTable(Table):
    """`[models.NAME.sampling]`: the parameters of requests that leave them out."""

    declared: ClassVar[dict[str, Key]] = {
        name: Key(
            _parameter(one),
            one.default,
            one.says,
            unit=one.unit,
            page=(name.replace("_", " ").capitalize(), f"{one.says}."),
        )
        for name, one in SAMPLING.items()
    }


class PresetTable(Table):
    """`[models.NAME.presets.NAME]`: the parameters of requests that leave them out."""

    declared: ClassVar[dict[str, Key]] = {
        name: Key(_parameter(one), None, one.says, unit=one.unit or "tokens")
        for name, one in SAMPLING.items()
    }
    max_tokens: int | None = key(
        _parameter(replace(NUMBERS["max_tokens"], low=1)),
        None,
        "how many tokens to generate at most",
        unit="tokens",
    )
    chat_template_kwargs: dict[str, Any] = key(
        JSON_TABLE, {}, "further arguments for the chat template, such as enable_thinking"
    )


class ModelTable(Table):
    """`[models.NAME]`, and `[defaults]`."""

    path: str | None = key(
        FOLDER,
        None,
        "a model folder in mlx-lm's format",
        "; this or `repo` is required",
    )
    repo: str | None = key(
        REPOSITORY,
        None,
        "instead of path: in the Hugging Face cache",
        ", the repository `OWNER/NAME`. Its files are used where they are, and those that are"
        " missing are [downloaded](#downloads) when it is loaded; the cache is where"
        " `HF_HUB_CACHE`, `HF_HOME` or `XDG_CACHE_HOME` says, or `~/.cache/huggingface/hub`",
        unit="name",
    )
    revision: str = key(
        REVISION,
        DEFAULT_REVISION,
        "with repo: its branch, tag or commit",
        "; which commit a branch means is looked up at the start and at a reload",
        unit="name",
    )
    aliases: list[str] = key(
        ALIAS,
        [],
        "other names for it, in requests and commands",
        "; the status shows it under its name",
        many=list,
        unit="names",
        page=("Other names", "Programs can use these names, too. Put commas between them."),
        takes="an array of names of 1 to 128 of the characters A-Z a-z 0-9 . _ / -, the first"
        " a letter or digit",
    )
    preload: bool = key(
        FLAG,
        _MODEL.preload,
        "load at startup; otherwise on the first request",
        ". At startup nothing is evicted: what does not fit into `memory_budget` stays PENDING",
        page=("Load when mlxsup starts", "Otherwise the first request loads it."),
    )
    pinned: bool = key(
        FLAG,
        _MODEL.pinned,
        "never evicted; its memory is reserved even while it is not loaded",
        page=("Always keep room for it", "Other models never get the memory that it needs."),
    )
    max_concurrency: int = key(
        number(int, f"an integer from 1 to {MAX_CONCURRENCY}", minimum=1, maximum=MAX_CONCURRENCY),
        _LAUNCH.max_concurrency,
        "requests that run at the same time, as rows of one batch",
        f"; up to {MAX_CONCURRENCY}",
        unit="requests",
        page=(
            "Answers at the same time",
            "Further requests wait. More at a time need more memory.",
        ),
    )
    idle_unload_s: float = key(
        DURATION,
        _MODEL.idle_unload_s,
        "unload after this long without a request; 0: never",
        page=(
            "Keep loaded for",
            "Time without a request, such as 30m or 2h. 0: until you unload it.",
        ),
    )
    load_stall_timeout_s: float = key(
        DURATION_ABOVE_ZERO,
        _MODEL.load_stall_timeout_s,
        "a load is ended after this long without progress",
        ", which counts as a crash",
    )
    step_timeout_s: float = key(
        DURATION_ABOVE_ZERO,
        _LAUNCH.step_timeout_s,
        "time limit for one step; a chunk of a prompt takes at most a tenth",
        ", and preparing one prompt may take ten times as long",
    )
    decode_stall_target_ms: int = key(
        COUNT_FROM_ONE,
        _LAUNCH.decode_stall_target_ms,
        "how long a chunk of a new prompt may hold up running answers",
        unit="milliseconds",
    )
    decode_share: float = key(
        DECODE_SHARE,
        _LAUNCH.decode_share,
        "running answers keep this share of the time while prompts are read",
    )
    context_length: int = key(
        COUNT,
        _LAUNCH.context_length,
        "tokens of prompt and answer together; 0: the model's own limit",
        ", or 4,096 with a warning if config.json declares none. It is capped at what the model"
        " declares, with a warning",
        unit="tokens",
        page=("Context length, in tokens", "Prompt and answer together. 0: as much as it can."),
    )
    deterministic: bool = key(
        FLAG,
        _LAUNCH.deterministic,
        "read prompts in chunks of a fixed size, and never from a cache",
    )
    memory: int | None = key(
        SIZE_OR_AUTO,
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
    cache_limit: int | None = key(
        SIZE_OR_AUTO,
        "auto",
        "how much memory MLX may keep for reuse",
        '; `"auto"`: on a GPU 8 GiB, or an eighth of its memory if that is less; on a CPU MLX\'s'
        " own limit. An idle worker frees this memory after three seconds in any case",
    )
    prefix_cache: int | None = key(
        SIZE_OR_AUTO,
        "auto",
        "memory for the prefixes of earlier prompts, to be reused; 0: none",
        '; `"auto"`: a tenth of the memory that is free after the load, or as much as a prompt of'
        " the whole context takes if that is more, but never more than half of what is free",
    )
    wired: int | None = key(
        SIZE_AUTO_OR_OFF, "off", 'memory that cannot be paged out; "auto": the size of the weights'
    )
    pooling: str = key(
        choice("", "mean", "cls", "last", "yes_no"),
        _LAUNCH.pooling,
        "make embeddings with any model: mean, cls or last",
        " of a text's vectors; `yes_no` ranks documents by whether the model would say yes or no,"
        " as Qwen3-Reranker; empty: as the files of the model say",
    )
    drafts: str = key(
        DRAFTS,
        _LAUNCH.drafts,
        '"ngram" or the folder of a draft model: guess tokens',
        ", which one pass reads, where that is faster: those that followed the same text before, or"
        " what a smaller model with the same tokenizer says. Its folder has a slash. Answers stay"
        " the same. `deterministic` models and those that embed do not guess, as a warning says",
        unit="folder",
    )
    draft_tokens: int = key(
        number(
            int, f"an integer from 1 to {MOST_DRAFT_TOKENS}", minimum=1, maximum=MOST_DRAFT_TOKENS
        ),
        _LAUNCH.draft_tokens,
        "how many tokens an answer guesses at once, at most",
        unit="tokens",
    )
    hosts: list[HostTable] = key(
        HostTable,
        [],
        "the hosts that serve the model together, this one first",
        "; see [groups](groups.md)",
        unit="tables",
        many=list,
        most=MAX_HOSTS,
        takes=f"a table for each of at most {MAX_HOSTS} hosts, [[models.NAME.hosts]], this"
        " machine first",
    )
    min_hosts: int = key(
        COUNT,
        _LAUNCH.min_hosts,
        "how many of the hosts are enough, this one included; 0: all",
        ". Those that cannot be reached are then left out until the next load, if the model fits"
        " into the memory of the others",
        unit="hosts",
    )
    parallel: str = key(
        choice("auto", "tensor", "pipeline"),
        _LAUNCH.parallel,
        "with hosts: how they divide the model",
        ". `tensor`: each layer among all of them; `pipeline`: some of the layers for each; `auto`:"
        " `pipeline` for the types of models that can be one, else `tensor`",
        unit="word",
    )
    engine: str = key(
        choice("mlx", "fake"),
        _LAUNCH.engine,
        '"mlx", or "fake", which answers without a model, for tests',
    )
    fake: dict[str, Any] = key(
        JSON_TABLE, {}, 'options of the fake engine; only with engine = "fake"'
    )
    restart: RestartTable = key(
        RestartTable, {}, "how often and how soon a crashed worker is started again"
    )
    sampling: SamplingTable = key(
        SamplingTable, {}, "the parameters of requests that leave them out"
    )
    adapters: dict[str, str] = key(
        FOLDER,
        {},
        "LoRA adapters: NAME:ADAPTER is the model with this one",
        takes=f"a table of at most {MAX_ADAPTERS} names, each with a folder",
        many=dict,
        most=MAX_ADAPTERS,
    )
    presets: dict[str, PresetTable] = key(
        PresetTable,
        {},
        "over HTTP, NAME:PRESET is the model with these parameters",
        takes="a table for each preset, [models.NAME.presets.PRESET]",
        many=dict,
    )


class FileTable(Table):
    """The whole file."""

    supervisor: SupervisorTable = key(SupervisorTable, {}, "the daemon itself")
    gateway: GatewayTable | None = key(
        GatewayTable, None, "the HTTP gateway; without this table there is none"
    )
    clients: dict[str, ClientTable] = key(
        ClientTable,
        {},
        'clients by name; "*" is for all that have no entry',
        takes="a table for each client, [clients.NAME]",
        many=dict,
        names=rf"^(\{ANYONE}|{CLIENT_NAME})$",
    )
    defaults: ModelTable = key(ModelTable, {}, "defaults for all models: any key of [models.NAME]")
    models: dict[str, ModelTable] = key(
        ModelTable,
        {},
        "the models to serve, by name",
        takes="a table for each model, [models.NAME]",
        many=dict,
        names=f"^{MODEL_NAME.pattern}$",
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
