"""Real MLX in real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import FinishReason, LoadPhase
from mlxsup.protocol.worker_messages import Dying, LoadProgress, Step

from support.tiny_model import make_tiny_model
from support.worker_harness import WorkerHarness

pytestmark = pytest.mark.mlx

READY_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    return [make_tiny_model(place / f"tiny{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def worker(folders: list[Path]) -> Iterator[WorkerHarness]:
    with WorkerHarness(engine="mlx", path=str(folders[0])) as worker:
        worker.wait_until_ready(READY_TIMEOUT_S)
        yield worker
        assert worker.ask_for_exit() == ExitCode.ASKED


def test_two_models_at_once_give_each_its_solo_answer_A8(folders: list[Path]) -> None:
    prompts = [f"tell me about number {number} " * number for number in range(1, 5)]
    with (
        WorkerHarness(engine="mlx", path=str(folders[0])) as first,
        WorkerHarness(engine="mlx", path=str(folders[1])) as second,
    ):
        workers = [first, second]
        solo = []
        for one in workers:
            one.wait_until_ready(READY_TIMEOUT_S)
            answers = []
            for prompt in prompts:
                (stream,) = one.finish(one.dispatch(prompt, max_tokens=40))
                answers.append((stream.tokens, stream.text))
            solo.append(answers)
        keys = [[one.dispatch(prompt, max_tokens=40) for prompt in prompts] for one in workers]
        for one, expected, own_keys in zip(workers, solo, keys, strict=True):
            together = one.finish(*own_keys)
            assert [(stream.tokens, stream.text) for stream in together] == expected
            assert {stream.finish for stream in together} == {FinishReason.LENGTH}
        assert solo[0] != solo[1]
        assert [one.ask_for_exit() for one in workers] == [0, 0]


def test_a_load_reports_its_phases_in_order_B1(worker: WorkerHarness) -> None:
    seen = [message for message in worker.messages if isinstance(message, LoadProgress)]
    assert list(dict.fromkeys(message.phase for message in seen)) == [
        LoadPhase.IMPORT,
        LoadPhase.WEIGHTS,
        LoadPhase.MATERIALISE,
        LoadPhase.WARMUP,
    ]


@pytest.mark.bits
def test_a_cancelled_row_leaves_the_others_alone_D3_D8(worker: WorkerHarness) -> None:
    (expected,) = worker.finish(worker.dispatch("stay here", max_tokens=60))
    stays = worker.dispatch("stay here", max_tokens=60)
    goes = worker.dispatch("go away", max_tokens=4000)
    while not worker.streams[goes].tokens:
        worker.wait_for(Step)
    worker.cancel(goes)
    cancelled, stayed = worker.finish(goes, stays)
    assert cancelled.finish is FinishReason.CANCELLED
    assert len(cancelled.tokens) < 4000
    assert (stayed.tokens, stayed.text) == (expected.tokens, expected.text)


def test_a_seeded_request_answers_alike_in_any_company_A6(worker: WorkerHarness) -> None:
    parameters: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    (alone,) = worker.finish(worker.dispatch("dice", **parameters))
    company = [worker.dispatch(f"other {number}", max_tokens=50) for number in range(3)]
    (together,) = worker.finish(worker.dispatch("dice", **parameters))
    assert together.tokens == alone.tokens
    worker.finish(*company)


def test_bad_requests_fail_alone_C7_G6(worker: WorkerHarness) -> None:
    bad = [
        worker.dispatch(messages=[{"role": "robot", "content": "x"}]),
        worker.dispatch(prompt_tokens=[5, 99_999]),
        worker.dispatch("far too long " * 4000),
    ]
    good = worker.dispatch("fine", max_tokens=5)
    streams = worker.finish(*bad, good)
    assert all(stream.error is not None for stream in streams[:3])
    assert len(streams[3].tokens) == 5


def test_a_missing_and_a_bad_model_have_their_exit_codes_B6(folders: list[Path]) -> None:
    missing = folders[0].with_name("absent")
    with WorkerHarness(engine="mlx", path=str(missing)) as worker:
        assert str(missing) in worker.wait_for(Dying, READY_TIMEOUT_S).message
        assert worker.exit_code() == ExitCode.MODEL_MISSING
    bad = make_tiny_model(folders[0].with_name("bad"))
    (bad / "config.json").write_text("{")
    # The JSON error speaks of a "property name", which holds a forbidden word.
    with WorkerHarness(engine="mlx", path=str(bad), log_may_hold=["rope"]) as worker:
        assert str(bad / "config.json") in worker.wait_for(Dying, READY_TIMEOUT_S).message
        assert worker.exit_code() == ExitCode.BAD_MODEL
