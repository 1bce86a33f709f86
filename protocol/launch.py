"""The spawn contract: how a supervisor starts a worker, and what the worker's exit code means.

The supervisor runs `python -P -m mlxsup.worker`, writes one `LaunchSpec` as a line of JSON to the
worker's standard input, and keeps that pipe open for as long as it lives: to the worker, EOF
on it means that its supervisor has died. The token that HELLO must carry travels there too, and so
not in the argument list or the environment, which others can read.

A prewarmed worker (`PREWARM_OPTION`) is started in the same way, but gets its line only when a
model needs it.

Every process that runs code of a model or of the network gets a part of the daemon's environment
only (`child_environment`): tokens and passwords stay with the daemon and its downloads.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from .ids import Generation, ModelName

TEXT_LIMIT_STEPS = 10.0
"""Tokenising one prompt may take this many times `step_timeout_s`."""


class ExitCode(IntEnum):
    """The meanings of a worker's exit codes; any other code or signal is a transient crash."""

    ASKED = 0
    BAD_LAUNCH = 64
    BAD_MODEL = 65
    MODEL_MISSING = 66
    NO_DEVICE = 69
    STEP_ERROR = 70
    WORKER_FAULT = 71
    GPU_FAULT_ELSEWHERE = 72
    STUCK_PROMPT = 73
    RANK_LOST = 74
    OUT_OF_MEMORY = 75
    LINK_BROKEN = 76


PERMANENT_EXITS = frozenset(
    {ExitCode.BAD_LAUNCH, ExitCode.BAD_MODEL, ExitCode.MODEL_MISSING, ExitCode.NO_DEVICE}
)
"""Exits that, before READY, no further attempt can fix, so there is none."""


MOST_DRAFT_TOKENS = 16
"""A row joins a batch with room for many times as many."""


MOST_DECODE_SHARE = 0.95
"""Prompts are read in what is left of the time: 20 times as long as alone, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHost:
    """A host of a model that several hosts serve together.

    Attributes:
        address: its own on the private link between the hosts.
        ssh: what `ssh` calls it; empty for this machine.
        python: the interpreter there that has mlxsup; empty for the leader's own.
        path: the model folder there; empty for the same as on the first host.
    """

    address: str = "127.0.0.1"
    ssh: str = ""
    python: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The settings of a model's process, from its entry: a change of any of these needs a new one.

    This is the only list of them. A key that people may set is added here and, with a title, in
    `supervisor/config/tables.py`; the engine reads it from its `LaunchSpec`.

    Attributes:
        path: the model folder, absolute.
        engine: `mlx`, or `fake` for the engine that tests use.
        max_concurrency: how many rows the batch may have.
        step_timeout_s: time limit for one step; no prefill chunk may come near it.
        decode_stall_target_ms: how long a prefill chunk may hold up rows that decode.
        decode_share: how much of the time rows that decode have while prompts are read.
        context_length: tokens of prompt and answer together; 0 for the model's own limit.
        deterministic: prefill chunks have a fixed size, and no prompt is taken from a cache.
        memory_limit_bytes: above this, MLX frees what it keeps for reuse; None: its own limit.
        cache_limit_bytes: how much memory MLX may keep for reuse; None: on a GPU a bounded share of
            its memory, on a CPU MLX's own limit.
        wired_limit_bytes: memory that may be wired; 0 for none, None for as much as was loaded.
        prefix_cache_bytes: memory for the prefixes of earlier prompts, to be reused; None: a share
            of the memory that is free after the load.
        sampling: parameters of requests that leave them out, by name; before those of the model.
        pooling: `mean`, `cls` or `last` to make an embedding model of any model, `yes_no` to rank
            with one; empty: as its folder says.
        adapters: folders of LoRA adapters, absolute, by name.
        drafts: `ngram` to let rows guess what followed the same tokens before; the folder of a
            draft model, absolute, to have that guess, too; `off`: they do not guess.
        draft_tokens: how many tokens a row guesses at once, at most.
        hosts: that serve the model together, this one first; empty: this one alone.
        min_hosts: how many of them are enough if others cannot be reached; 0: all.
        parallel: how they divide it: `tensor`, each layer among all of them, `pipeline`, some
            layers for each, or `auto`, as a pipeline if the type of the model can be one.
        fake: options of the fake engine, by name.
    """

    path: str = ""
    engine: str = "mlx"
    max_concurrency: int = 8
    step_timeout_s: float = 30.0
    decode_stall_target_ms: int = 250
    decode_share: float = 0.5
    context_length: int = 0
    deterministic: bool = False
    memory_limit_bytes: int | None = None
    cache_limit_bytes: int | None = None
    wired_limit_bytes: int | None = 0
    prefix_cache_bytes: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    pooling: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    drafts: str = "off"
    draft_tokens: int = 4
    hosts: tuple[GroupHost, ...] = ()
    min_hosts: int = 0
    parallel: str = "auto"
    fake: dict[str, Any] = field(default_factory=dict)

    @property
    def draft_folder(self) -> str:
        """Return the folder of the draft model; empty if there is none."""
        return self.drafts if os.path.isabs(self.drafts) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec(LaunchSettings):
    """Everything that a worker gets at its start.

    Attributes:
        model: the model's name, for logs and HELLO.
        generation: which life of the worker this is.
        token: what HELLO must carry, so that no other process can pose as this worker.
        endpoint: where the supervisor listens for this worker alone (`ipc://…`).
        supervisor_pid: the process whose death the worker watches for.
        known_batching: what an earlier life found out, so that this one need not: `fingerprint`,
            `batching` and `reason`; None for nothing.
        learned_dir: where it keeps what it has compiled for its model, for later lives;
            None for nowhere.
        log_level: `debug`, `info`, `warning` or `error`.
    """

    model: ModelName
    generation: Generation
    token: str
    endpoint: str
    supervisor_pid: int
    known_batching: dict[str, str] | None = None
    learned_dir: str | None = None
    log_level: str = "info"

    @classmethod
    def of(cls, settings: LaunchSettings, **others: Any) -> LaunchSpec:
        """Make a spec with these settings; `others` are the remaining fields."""
        given = {f.name: getattr(settings, f.name) for f in fields(LaunchSettings)}
        return cls(**given, **others)


PREWARM_OPTION = "--prewarm"
"""Makes a worker import everything before it reads its launch spec; the number of a descriptor
follows, to which it then writes one byte."""


def prewarmed_argv(worker: Sequence[str], ready_pipe: int) -> list[str]:
    """Return the command that starts a prewarmed worker.

    Args:
        worker: the command that starts a worker.
        ready_pipe: a descriptor that it inherits.
    """
    return [*worker, PREWARM_OPTION, str(ready_pipe)]


def worker_argv(python: str = sys.executable) -> list[str]:
    """Return the command that starts a worker; -P keeps the working folder out of the import
    path."""
    return [python, "-P", "-m", "mlxsup.worker"]


INHERITED = frozenset({
    "HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TEMP", "TERM", "TMP", "TMPDIR", "TZ",
    "TZDIR", "USER", "VIRTUAL_ENV", "__CF_USER_TEXT_ENCODING",
})  # fmt: skip
"""Variables that workers and the gateway inherit, beside those with an inherited prefix."""

INHERITED_PREFIXES = (
    "LC_", "XDG_", "LD_", "DYLD_", "PYTHON", "CONDA_", "MLXSUP_",
    "MLX_", "MTL_", "METAL_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "VECLIB_", "MALLOC_", "GLIBC_TUNABLES",
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TIKTOKEN_", "RAYON_", "RUST_",
)  # fmt: skip

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|(^|_)(KEY|KEYS|PAT|PASS)(_|$)"
)
_SECRET_VALUE = re.compile(r"://[^/\s]*@")
"""A URL with a password, as of a private mirror; workers fetch nothing."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that workers and the gateway inherit.

    They need what finds programs, libraries and devices, and what sets those up. The list names
    what passes, because a list of secrets is never complete.
    """
    return {
        name: value
        for name, value in environment.items()
        if (name in INHERITED or name.startswith(INHERITED_PREFIXES))
        and not _SECRET_NAME.search(name.upper())
        and not _SECRET_VALUE.search(value)
    }


def lower_limit(which: int, most: int) -> None:
    """Let this process take at most so much of something, or what it may take if that is less.

    Args:
        which: one of `resource.RLIMIT_…`.
        most: in the unit of that limit.
    """
    _, hard = resource.getrlimit(which)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (soft, hard))
