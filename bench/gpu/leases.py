"""Two models on one GPU that read long prompts, in turns and at once (`bench/leases.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..fast_path.results import Found, Founds
from ..fast_path.stages import Rows, Setting, Stage
from ..leases import MODELS, Round, measure
from ..long_prompt import ROWS
from .models import model
from support.daemon import Daemon

PROMPT_TOKENS = 16_384
REPEATS = 5


async def leases(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Rounds with leases and without, in turn, in one daemon."""
    count = 256 if setting.is_small else PROMPT_TOKENS
    entry = {
        "path": str(model(setting, "03b")),
        "preload": False,
        "max_concurrency": 2 * ROWS,
    }
    entries = dict.fromkeys(MODELS, entry)
    with Daemon(entries) as daemon:
        rounds = await measure(daemon, entries, count, setting.runs(REPEATS))
    yield (
        "leases",
        founds(rounds, f"two of 03b, {ROWS} answers of each, prompts of {count:,} tokens"),
    )


def founds(rounds: Mapping[str, Sequence[Round]], note: str) -> Founds:
    """What rounds in turns show, next to the rounds at once with which they took turns."""

    def ratio(of: Callable[[Round], float], unit: str, note: str = "") -> Found:
        sides = {name: [of(one) for one in some] for name, some in rounds.items()}
        values = [ours / theirs for ours, theirs in zip(*sides.values(), strict=True)]
        return Found(values=values, sides=sides, unit=unit, note=note)

    return {
        "leases_gap": ratio(lambda one: max(one.gaps_ms), "ms", note),
        "leases_answers": ratio(lambda one: one.decoded_per_s, "tok/s"),
        "leases_first": ratio(lambda one: one.first_s[1], "s"),
    }


STAGES = (Stage(name="leases", rows=("leases",), measure=leases),)
