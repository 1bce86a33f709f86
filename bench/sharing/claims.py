"""What sharing one machine claims, in the order of docs/sharing.md."""

from __future__ import annotations

from ..claim import Claim

VIRTUAL = "virtual time"
REAL = "MLX, CPU"
GPU = "MLX, CUDA"
CORE = "the core alone"

CLAIMS = (
    Claim(
        id="bound", on=VIRTUAL, limit=1.0, is_worst=True,
        what="two accounts that both always wait: the difference of what they received, over"
        " weight, as a part of the bound",
    ),
    Claim(
        id="weights", on=VIRTUAL, limit=0.05, is_worst=True, unit="%", digits=1,
        what="weights 1:2:4: how far a share is from its weight",
    ),
    Claim(
        id="jain", on=VIRTUAL, limit=0.95, is_least=True, is_worst=True, digits=3,
        what="Jain's index of what two accounts received, one asking for ten times as much",
    ),
    Claim(
        id="starved", on=VIRTUAL, limit=0, is_worst=True, unit="requests", digits=0,
        what="requests below a flood of a higher class that waited longer than twice `aging_s`, and"
        " then for what their accounts' counters allow",
    ),
    Claim(
        id="longest_wait", on=VIRTUAL, is_worst=True, digits=2,
        what="their longest wait, in units of twice `aging_s`",
    ),
    Claim(
        id="light_next_to_heavy", on=REAL, limit=2.0,
        what="a light client next to a heavy one: first token, p99 of at least 300, to that with"
        " one competitor",
    ),
    Claim(
        id="interactive_first_token", on=REAL, limit=1.5, slack="plus one step",
        what="an interactive request among 8 batch rows: first token, median of at least 30, to"
        " that on a free row next to 7",
    ),
    Claim(
        id="interactive_bits", on=REAL, limit=1.0, is_least=True, is_worst=True, unit="%",
        digits=0, what="the streams that were paused for it and equal the undisturbed ones",
    ),
    Claim(
        id="bits_gpu_kept", on=GPU, unit="%", digits=0,
        what="the same on a GPU, with the row's state kept",
    ),
    Claim(
        id="bits_gpu_dropped", on=GPU, unit="%", digits=0,
        what="the same on a GPU, with the row's state dropped",
    ),
    Claim(
        id="over_budget", on=REAL, limit=0, is_worst=True, unit="samples", digits=0,
        what="samples, ten a second, in which more was reserved than the budget",
    ),
    Claim(
        id="gives_back", on=REAL, limit=2.0, is_worst=True, unit="s",
        what="how long more was measured than reserved",
    ),
    Claim(
        id="swap_shares", on=REAL, limit=0.10, is_worst=True, unit="%", digits=1,
        what="two models that do not fit together, at least 60 swaps: how far a share of the READY"
        " seconds is from one half, over that half",
    ),
    Claim(
        id="swap_lost", on=REAL, limit=0, is_worst=True, unit="streams", digits=0,
        what="the streams that these swaps lost or changed",
    ),
    Claim(
        id="swaps_per_minute", on=REAL, digits=1,
        what="swaps per minute, next to one server that is asked for both models in turn",
    ),
    Claim(
        id="swap_time", on=REAL, unit="%", digits=0,
        what="the part of the time in which neither model was READY",
    ),
    Claim(
        id="turns_three", on=REAL, limit=0, is_worst=True, unit="turns", digits=0,
        what="three models that want in, long prompts: turns that delivered no token",
    ),
    Claim(
        id="turns_five", on=REAL, limit=0, is_worst=True, unit="turns", digits=0,
        what="five models that want in, long prompts: turns that delivered no token",
    ),
    Claim(
        id="unload_drift", on=REAL, limit=0.01, is_worst=True, unit="%", digits=2,
        what="50 unloads of a model of at least 1 GiB: what memory grew by, over the weights",
    ),
    Claim(
        id="hit_rate", on=VIRTUAL, unit="%", digits=1,
        what="12 equal models, a budget for 4, Zipf: requests that find their model loaded",
    ),
    Claim(
        id="hit_rate_real", on=REAL, unit="%", digits=1,
        what="the same with real processes, ten minutes",
    ),
    Claim(
        id="engine_seconds", on=REAL, limit=0.03, unit="%", digits=1,
        what="engine seconds of all requests, against the busy time sampled from outside",
    ),
    Claim(
        id="leases_gap", on=GPU, digits=2,
        what="two models on one GPU read long prompts: the largest gap of an answer with leases,"
        " to that without",
    ),
    Claim(
        id="handle_1", on=CORE, limit=0.10, unit="%", digits=1,
        what="`Core.handle` of a step of 1 row: how much more than before sharing",
    ),
    Claim(
        id="handle_16", on=CORE, limit=0.10, unit="%", digits=1,
        what="`Core.handle` of a step of 16 rows: how much more than before sharing",
    ),
    Claim(
        id="handle_64", on=CORE, limit=0.10, unit="%", digits=1,
        what="`Core.handle` of a step of 64 rows: how much more than before sharing",
    ),
    Claim(
        id="dispatch_1024", on=CORE, limit=2.0,
        what="a dispatch with 1,024 waiting requests of 100 accounts, to one with 128",
    ),
    Claim(
        id="dispatch_8192", on=CORE, limit=2.0,
        what="a dispatch with 8,192 waiting requests of 100 accounts, to one with 128",
    ),
)  # fmt: skip
