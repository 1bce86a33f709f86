"""Steps of real MLX that raise, never end or take long: mlx-lm's batch is sabotaged in the worker.

The same with the fake engine: tests/integration/test_daemon_crash.py and test_daemon_stalls.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.mlx, pytest.mark.bits]

LIMIT_S = 2.0
"""Ten times what any honest step of the tiny model takes on a busy machine."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


PASS_S = 0.2
"""What each pass takes at least where the sabotage dawdles."""


def sabotaged(what: str, tiny: Path, **changes: Any) -> LossyDaemon:
    """A daemon with the real model `m`, which is struck once, and a fake one beside it."""
    models = {
        "m": {"path": str(tiny), "preload": True, "step_timeout_s": LIMIT_S, "restart": PATIENT}
        | changes,
        "other": fake(fake={"step_s": 0.02}),
    }
    return LossyDaemon(what, models)


def interrupted_answer(daemon: LossyDaemon, reason: str) -> dict[str, Any]:
    """Has an answer struck and finished by the next process; returns the model's row after it."""
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        assert not daemon.struck.exists(), "the load is not struck"
        other = Reader(client, "other", "undisturbed", max_tokens=200)
        struck = client.complete("m", prompt="Once upon", max_tokens=60)
        assert daemon.struck.exists()
        assert (struck.resumed, len(struck.token_ids)) == (1, 60)
        again = client.complete("m", prompt="Once upon", max_tokens=60)
        assert (again.resumed, again.token_ids) == (0, struck.token_ids)
        assert other.finished().token_ids == undisturbed("undisturbed", 200)
        assert row(client, "other")["generation"] == 1
        after = row(client, "m")
        assert (after["generation"], after["last_exit"]["reason"]) == (2, reason)
        return after


def test_a_pass_of_mlx_that_raises_ends_the_worker_and_no_other_follows_F3(tiny: Path) -> None:
    with sabotaged("pass raises", tiny) as daemon:
        daemon.provoke("Traceback", model="m", pattern=r"ValueError: \[matmul\]", at_most=1)
        after = interrupted_answer(daemon, "crash")
        assert after["last_exit"]["code"] == 70
        assert "ValueError: [matmul]" in after["last_exit"]["detail"]
        assert daemon.struck.read_text() == "x", "not one pass after the one that raised"


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("pass sleeps", id="others run"),
        pytest.param("pass holds", id="interpreter held"),
    ],
)
def test_a_pass_of_mlx_that_never_ends_is_found_and_its_stacks_dumped_F5_F6(
    tiny: Path, what: str
) -> None:
    with sabotaged(what, tiny) as daemon:
        interrupted_answer(daemon, "stall")
        log = daemon.log_text()
        assert "most recent call first" in log
        assert "in compute_and_act" in log, "the pass"
        assert "engines/mlx/batch.py" in log, "and who called it"


def test_a_long_prompt_in_honest_passes_of_mlx_is_no_stall_F5(tiny: Path) -> None:
    """Prefill for several limits of a step, in passes of a tenth of one each."""
    prompt = [300 + number * 7919 % 1700 for number in range(60)]
    with sabotaged("passes dawdle", tiny) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        answer = client.complete("m", prompt_tokens=prompt, max_tokens=4)
        assert (answer.resumed, len(answer.token_ids)) == (0, 4)
        assert answer.usage.prompt_tokens == 60
        after = row(client, "m")
        assert (after["generation"], after["last_exit"]) == (1, None)
        assert after["steps"] * PASS_S > 2 * LIMIT_S
