"""What the fast path claims: rows in order of importance, each measured and saved as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..claim import Claim

CPU = "MLX, CPU"
GPU = "MLX, CUDA"
FAKE = "fake engine, CPU"

STREAMS = (16, 64, 1, 4)
"""Of a model on a GPU, the most important first."""

PAIRED_STREAMS = (1, 4, 8, 16)
TARGET_MS = 250
"""`decode_stall_target_ms`, as long as nobody sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is measured together, in at most eight minutes on a GPU.

    Attributes:
        name: of its file.
        claims: that it has figures for.
    """

    name: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a model on a GPU is held to, by streams if it differs.

    Attributes:
        steady: tokens per second while all streams run, to those in one process.
        whole: the same from the first prompt sent to the last token.
        first_times: time to first token, the median of a burst, to that in one process.
        first_more_ms: the same, how much more it is.
    """

    steady: float
    whole: float
    first_times: dict[int, float]
    first_more_ms: dict[int, float]


DEMANDS = {
    "7b": Demands(
        steady=0.95, whole=0.92, first_times={1: 1.2, 16: 1.5, 64: 2.0}, first_more_ms={}
    ),
    "03b": Demands(steady=0.92, whole=0.90, first_times={}, first_more_ms={16: 30.0, 64: 80.0}),
}


def against(model: str, streams: int) -> Row:
    """A burst on a GPU, next to the same burst in one process."""
    demands, row = DEMANDS[model], f"{model}_{streams}"
    what = f"{model}, {'one stream' if streams == 1 else f'{streams} streams'}:"
    first = "a lone request's first token" if streams == 1 else "first token, median of a burst"
    if streams in demands.first_more_ms:
        first_claim = Claim(
            id=f"{row}_first", on=GPU, limit=demands.first_more_ms[streams], unit="ms", digits=0,
            what=f"{what} {first}, more than in one process",
        )  # fmt: skip
    else:
        first_claim = Claim(
            id=f"{row}_first", on=GPU, limit=demands.first_times.get(streams),
            what=f"{what} {first}, to that in one process",
        )  # fmt: skip
    return Row(
        name=row,
        claims=(
            Claim(
                id=f"{row}_steady", on=GPU, limit=demands.steady, is_least=True,
                what=f"{what} tokens per second while all run, to those in one process",
            ),
            Claim(
                id=f"{row}_whole", on=GPU, limit=demands.whole, is_least=True,
                what=f"{what} tokens per second of the whole run, to those in one process",
            ),
            first_claim,
        ),
    )  # fmt: skip


def one(name: str, **about: Any) -> Row:
    """A row with one claim of the same name."""
    return Row(name=name, claims=(Claim(id=name, **about),))


def paired(streams: int) -> Row:
    """A burst on a CPU, next to the same burst in one process."""
    return one(
        f"tiny_{streams}", on=CPU, limit=0.85 if streams == 1 else 0.95, is_least=True,
        what=f"tiny model, {'one stream' if streams == 1 else f'{streams} streams'}: tokens per"
        " second of the whole run, to those in one process",
    )  # fmt: skip


ON_GPU = (
    *(against("7b", streams) for streams in STREAMS),
    Row(
        name="recovery",
        claims=(
            Claim(
                id="recovery", on=GPU, limit=2.5, unit="s",
                what="kill −9 of 7b with 16 streams: until the last of them continues, more than a"
                " load in one process",
            ),
            Claim(
                id="recovery_lost", on=GPU, limit=0, is_worst=True, unit="streams", digits=0,
                what="the streams that these kills lost, or cut or lengthened by a token",
            ),
        ),
    ),
    one(
        "recovery_spare", on=GPU, limit=1.0,
        what="the same with a spare worker, to a load in one process",
    ),
    *(against("03b", streams) for streams in STREAMS),
    *(
        one(
            f"first_burst_{model}", on=GPU, limit=1.3,
            what=f"{model}, 16 streams: first token of the first burst after a load, to that of the"
            " third one",
        )
        for model in ("7b", "03b", "1b4")
    ),
    Row(
        name="long_prompts",
        claims=(
            Claim(
                id="long_prompts_died", on=GPU, limit=0, is_worst=True, unit="processes",
                digits=0, what="two engines of 7b, a prompt of 32,768 tokens each in every turn, 20"
                " turns: processes that died in a turn, of lack of memory or otherwise",
            ),
            Claim(
                id="long_prompts_lost", on=GPU, limit=0, is_worst=True, unit="requests", digits=0,
                what="the requests that failed in a turn",
            ),
            Claim(
                id="long_prompts_idle", on=GPU, unit="GiB", digits=1,
                what="what an engine holds a few seconds later: weights, caches and what is kept"
                " for reuse",
            ),
        ),
    ),
    *(
        one(
            f"kernels_{model}", on=GPU, limit=5.0, is_worst=True, unit="s",
            what=f"{model}, no kernel compiled before: the longest wait for a token after READY, an"
            " upper bound of the longest step",
        )
        for model in ("1b4", "7b", "03b")
    ),
    Row(
        name="beside_03b",
        claims=(
            Claim(
                id="beside_03b", on=GPU, limit=100, is_worst=True, unit="ms", digits=0,
                what="03b streams while 7b reads 32,768 tokens: the largest gap",
            ),
            Claim(
                id="beside_03b_first", on=GPU, limit=2.0,
                what="first token of a new request to 03b meanwhile, to that alone",
            ),
        ),
    ),
    one(
        "beside_7b", on=GPU, limit=100, is_worst=True, unit="ms", digits=0,
        what="7b streams while another 7b reads 32,768 tokens: the largest gap",
    ),
    one(
        "at_once", on=GPU, limit=1.47, is_least=True,
        what="7b and 03b answer one after the other, to both at once: the time that it takes",
    ),
    Row(
        name="leases",
        claims=(
            Claim(
                id="leases_gap", on=GPU,
                what="two models read long prompts at the same time, chunk by chunk in turns:"
                " the largest gap of an answer of either, to that without turns",
            ),
            Claim(
                id="leases_answers", on=GPU,
                what="the same: tokens per second of these answers meanwhile",
            ),
            Claim(
                id="leases_first", on=GPU,
                what="the same: first token of the prompt that is read later",
            ),
        ),
    ),
    Row(
        name="equality",
        claims=tuple(
            Claim(
                id=f"equality_{how}_{drawn}", on=GPU, unit="%", digits=0,
                what=f"answers that are the same, bit by bit, {about}, {drawn}",
            )
            for drawn in ("greedy", "sampled")
            for how, about in (
                ("kept", "after a pause with the row's state kept"),
                ("dropped", "after one with the state dropped"),
            )
        ),
    ),
)  # fmt: skip

ON_CPU = (
    *(paired(streams) for streams in PAIRED_STREAMS),
    Row(
        name="router",
        claims=(
            Claim(
                id="router_one", on=FAKE, limit=4.0, unit="µs", digits=1,
                what="router CPU per token, 16 streams on one connection, unpaced",
            ),
            Claim(
                id="router_many", on=FAKE, limit=9.0, unit="µs", digits=1,
                what="the same on 16 connections",
            ),
            Claim(
                id="router_logprobs", on=FAKE, limit=5.0, unit="µs", digits=1,
                what="the same on one connection, `top_logprobs` 20",
            ),
        ),
    ),
    Row(
        name="paced",
        claims=tuple(
            Claim(
                id=f"paced_{streams}", on=FAKE, limit=1.3,
                what=f"router CPU per step at 200 steps per second, {streams} in each step, to that"
                " of a bare forwarder",
            )
            for streams in (1, 16)
        ),
    ),
    one(
        "beside_tiny", on=CPU, limit=100, is_worst=True, unit="ms", digits=0,
        what="the tiny model streams while SmolLM2 reads a prompt: the largest gap",
    ),
    one(
        "beside_equal", on=CPU, limit=TARGET_MS, is_worst=True, unit="ms", digits=0,
        what="SmolLM2 streams while another SmolLM2 reads a prompt: the largest gap, less two"
        " of its steps alone (their p99)",
    ),
    one(
        "within", on=CPU, limit=TARGET_MS, is_worst=True, unit="ms", digits=0,
        what="four rows stream while 40,000 tokens are read within the same model: the largest gap,"
        " less one step alone (their p99; the rule of `bench/long_prompt.py`)",
    ),
)  # fmt: skip

ROWS = {row.name: row for row in (*ON_GPU, *ON_CPU)}


def claims() -> Iterator[Claim]:
    """All of them, in the order of the table."""
    for row in ROWS.values():
        yield from row.claims
