"""How the rows of the fast path are run: resumed, interrupted, and each with tiny shapes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.fast_path.claims import ROWS
from bench.fast_path.cpu import STAGES as CPU_STAGES
from bench.fast_path.document import FAST_PATH, Sheet
from bench.fast_path.results import TRIAL, Found, Store
from bench.fast_path.stages import Rows, Setting, Stage, main, run_stage
from bench.gpu.__main__ import STAGES as GPU_STAGES
from bench.http.document import HTTP
from bench.http.stages import STAGES as HTTP_STAGES
from bench.thread_clock import thread_ns
from support.verdict import EXIT_CODES, Verdict

EVERY: dict[str, tuple[Sequence[Stage], Sheet]] = {
    "bench.gpu": (GPU_STAGES, FAST_PATH),
    "bench.fast_path": (CPU_STAGES, FAST_PATH),
    "bench.http": (HTTP_STAGES, HTTP),
}
STAGE = ("--small", "--stage", "router", "--rows", "router")
NOT_SHOWN = EXIT_CODES[Verdict.NOT_SHOWN]


def run(script: str, limit_s: float = 60.0) -> str:
    return run_stage([sys.executable, "-c", script], limit_s)


def test_a_stage_that_fails_says_why_with_its_last_words() -> None:
    assert run("import bench.report, support.verdict") == ""
    assert run("raise RuntimeError('no room')") == "RuntimeError: no room"
    assert run("raise SystemExit(7)") == "it ended with exit code 7"


def test_a_stage_that_takes_too_long_may_end_what_it_has_started(tmp_path: Path) -> None:
    marker = tmp_path / "ended"
    script = (
        "import time\ntry:\n    time.sleep(600)\n"
        f"except KeyboardInterrupt:\n    open({str(marker)!r}, 'w').close()"
    )
    assert run(script, limit_s=5.0) == "it took longer than 5 s"
    assert marker.exists()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells it in /proc")
def test_the_clock_of_a_thread_counts_what_it_works() -> None:
    before = thread_ns(os.getpid())
    sum(range(3_000_000))
    assert thread_ns(os.getpid()) > before + 1_000_000


# ---------------------------------------------------------------- the command line


def test_rows_that_are_there_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = {claim.id: Found(values=[0.0]) for claim in ROWS["router"].claims}
    Store(tmp_path, TRIAL).save("router", claims, 1.0)
    words = [str(tmp_path), "--small", "--rows", "router"]
    assert main(CPU_STAGES, "no.such.module", None, sheet=FAST_PATH, words=words) == 0
    assert capsys.readouterr().out.count("kept") == 3
    claims["router_many"] = Found(values=[9.1])
    Store(tmp_path, TRIAL).save("router", claims, 1.0)
    missed = main(CPU_STAGES, "no.such.module", None, sheet=FAST_PATH, words=words)
    assert missed == EXIT_CODES[Verdict.MISSED]


def test_a_row_without_figures_is_an_attempt_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path), "--small", "--rows", "tiny_1", "router"]
    assert main(CPU_STAGES, "no.such.module", None, sheet=FAST_PATH, words=words) == NOT_SHOWN
    failures = Store(tmp_path, TRIAL).failures()
    assert [failure.rows for failure in failures] == [["tiny_1"], ["router"]]
    assert all("no.such" in failure.reason for failure in failures)
    assert capsys.readouterr().out.count("no.such") == 2


def test_wrong_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--rows", "nothing"], "nothing: known are tiny_1"),
        (["--small", "--keep"], "nobody"),
    ):
        with pytest.raises(SystemExit):
            main(CPU_STAGES, "no.such.module", None, sheet=FAST_PATH, words=[str(tmp_path), *words])
        assert said in capsys.readouterr().err


def test_models_are_found_from_everywhere_if_the_folder_is_named_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the documents' own command: a daemon takes a relative path from its file's folder."""
    seen: list[Path] = []

    async def look(setting: Setting, wanted: Sequence[str]) -> Rows:
        seen.append(setting.models)
        yield "router", {claim.id: Found(values=[0.0]) for claim in ROWS["router"].claims}

    monkeypatch.chdir(tmp_path)
    stage = Stage(name="router", rows=("router",), measure=look)
    for words in (["build/rows"], ["rows", "--models", "build/rows/models"]):
        main([stage], "no.such.module", None, sheet=FAST_PATH, words=[*words, *STAGE])
    assert seen == [tmp_path.resolve() / "build/rows/models"] * 2


# ---------------------------------------------------------------- every row, small


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.parametrize(
    ("module", "stage"),
    [
        pytest.param(module, stage, id=f"{module}-{stage.name}")
        for module, (stages, _) in EVERY.items()
        for stage in stages
    ],
)
def test_every_row_can_be_tried_on_this_machine(
    module: str, stage: Stage, tmp_path: Path, models: Path
) -> None:
    stages, sheet = EVERY[module]
    words = [str(tmp_path), "--small", "--models", str(models), "--rows", *stage.rows]
    main(stages, module, None, sheet=sheet, words=words)
    assert Store(tmp_path, TRIAL).failures() == []
    for row in stage.rows:
        entry = json.loads((tmp_path / f"{row}.json").read_text())
        assert set(entry["found"]) == {claim.id for claim in sheet.rows[row].claims}
        assert all(found["values"] for found in entry["found"].values())
    shutil.rmtree(tmp_path)
