"""The claims of the fast path, what is kept of them, and their table. No process, no clock."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mlxsup.protocol.launch import LaunchSettings

from bench.claim import NOT_MEASURED
from bench.fast_path import document
from bench.fast_path.claims import GPU, ON_CPU, ON_GPU, ROWS, TARGET_MS, claims
from bench.fast_path.cpu import STAGES as CPU_STAGES
from bench.fast_path.document import FAST_PATH, Kept, figure_text, line, sides_text
from bench.fast_path.results import TRIAL, Failure, Found, Founds, Result, Store
from bench.fast_path.stages import missing
from bench.gpu.__main__ import STAGES as GPU_STAGES
from bench.gpu.shared import SHARED, share
from bench.long_prompt import TARGET_MS as LONG_PROMPT_TARGET_MS
from bench.report import interval_of_median
from bench.sharing import figures as sharing
from bench.sharing.claims import CLAIMS as SHARING_CLAIMS
from support.verdict import Verdict

BY_ID = {claim.id: claim for claim in claims()}
COMMIT = "c" * 40


def result(row: str, found: Founds, commit: str = COMMIT) -> Result:
    return Result(
        row=row, commit=commit, machine="a machine", ended="2026-11-23", took_s=1.0, found=found
    )


def complete(row: str, value: float = 1.0) -> Founds:
    return {claim.id: Found(values=[value]) for claim in ROWS[row].claims}


# ---------------------------------------------------------------- what is claimed

LIMITS = {
    "7b_1_steady": 0.95, "7b_64_steady": 0.95, "7b_1_whole": 0.92, "7b_64_whole": 0.92,
    "7b_1_first": 1.2, "7b_4_first": None, "7b_16_first": 1.5, "7b_64_first": 2.0,
    "03b_16_steady": 0.92, "03b_4_whole": 0.90, "03b_1_first": None, "03b_16_first": 30,
    "03b_64_first": 80, "recovery": 2.5, "recovery_lost": 0, "recovery_spare": 1.0,
    "first_burst_7b": 1.3, "first_burst_03b": 1.3, "first_burst_1b4": 1.3, "kernels_1b4": 5.0,
    "long_prompts_died": 0, "long_prompts_lost": 0, "long_prompts_idle": None, "beside_03b": 100,
    "beside_7b": 100, "tiny_1": 0.85, "tiny_4": 0.95, "tiny_8": 0.95, "tiny_16": 0.95,
    "router_one": 4, "router_many": 9, "router_logprobs": 5, "paced_1": 1.3, "paced_16": 1.3,
    "beside_tiny": 100, "beside_equal": 250, "within": 250, "leases_gap": None,
    "leases_answers": None, "leases_first": None,
}  # fmt: skip
"""As they were asked for; None is reported only."""


def test_the_limits_are_those_that_were_asked_for() -> None:
    assert {id: BY_ID[id].limit for id in LIMITS} == LIMITS


def test_a_claim_is_missed_on_the_wrong_side_of_its_limit() -> None:
    for id, limit in LIMITS.items():
        if limit is None:
            assert document.verdict(BY_ID[id], Found(values=[1.0])) is Verdict.REPORTED
            continue
        worse = limit - 0.01 if BY_ID[id].is_least else limit + 0.01
        assert document.verdict(BY_ID[id], Found(values=[limit])) is Verdict.KEPT
        assert document.verdict(BY_ID[id], Found(values=[worse])) is Verdict.MISSED


def test_what_must_never_happen_is_judged_by_its_worst_run_and_speeds_by_their_median() -> None:
    worst = {claim.id for claim in claims() if claim.is_worst}
    assert worst == {
        "recovery_lost", "kernels_7b", "kernels_03b", "kernels_1b4", "long_prompts_died",
        "long_prompts_lost", "beside_03b", "beside_7b", "beside_tiny", "beside_equal", "within",
    }  # fmt: skip
    gaps = Found(values=[20.0] * 8 + [101.0])
    assert document.verdict(BY_ID["beside_tiny"], gaps) is Verdict.MISSED
    ratios = Found(values=[0.5, 0.96, 0.97])
    assert document.verdict(BY_ID["tiny_16"], ratios) is Verdict.KEPT


def test_the_target_of_a_stall_is_the_default_and_that_of_the_long_prompt() -> None:
    assert LaunchSettings().decode_stall_target_ms == TARGET_MS == LONG_PROMPT_TARGET_MS


def test_each_row_is_measured_by_one_stage_of_its_machine() -> None:
    for rows, stages in ((ON_GPU, GPU_STAGES), (ON_CPU, CPU_STAGES)):
        measured = [row for stage in stages for row in stage.rows]
        assert sorted(measured) == sorted(row.name for row in rows)
        assert measured[0] == rows[0].name, "the most important row is measured first"
    names = [claim.id for claim in claims()]
    assert len(set(names)) == len(names)
    assert len(ROWS) == len(ON_GPU) + len(ON_CPU)


# ---------------------------------------------------------------- the interval of a median


def chance_outside(count: int, place: int) -> float:
    """Of the median of count values being outside of the place-th smallest and largest: counted."""
    flips = itertools.product((0, 1), repeat=count)
    return float(sum(not place <= sum(one) <= count - place for one in flips) / 2**count)


@pytest.mark.parametrize("count", range(1, 15))
def test_the_interval_is_the_narrowest_that_holds_the_median_in_95_of_100_cases(count: int) -> None:
    interval = interval_of_median([float(value) for value in range(count, 0, -1)])
    enough = [place for place in range(1, count // 2 + 1) if chance_outside(count, place) <= 0.05]
    assert interval == ((max(enough), count + 1 - max(enough)) if enough else None)


def test_of_21_values_it_is_the_6th_and_the_16th() -> None:
    assert interval_of_median([float(value) for value in range(1, 22)]) == (6.0, 16.0)
    assert interval_of_median([1.0] * 5) is None


# ---------------------------------------------------------------- what is kept


def test_a_row_is_there_for_its_own_commit_only(tmp_path: Path) -> None:
    store = Store(tmp_path, COMMIT)
    assert store.load("tiny_1") is None
    saved = store.save("tiny_1", {"tiny_1": Found(values=[0.9], sides={"mlxsup": [1.0]})}, 12.34)
    assert store.load("tiny_1") == saved
    assert saved.took_s == 12.3
    assert saved.machine
    assert Store(tmp_path, "d" * 40).load("tiny_1") is None


def test_only_what_lacks_is_measured(tmp_path: Path) -> None:
    store = Store(tmp_path, COMMIT)
    for row in ("tiny_4", "router"):
        store.save(row, complete(row), 1.0)
    names = ["tiny_1", "tiny_4", "router", "within"]
    lacking = [(stage.name, rows) for stage, rows in missing(CPU_STAGES, store, names)]
    assert lacking == [("pairs", ["tiny_1"]), ("within", ["within"])]


def test_attempts_without_figures_are_kept_for_their_commit(tmp_path: Path) -> None:
    store = Store(tmp_path, COMMIT)
    assert store.failures() == []
    store.note_failure(["router"], "it took longer than 480 s")
    Store(tmp_path, "d" * 40).note_failure(["paced"], "another one")
    [failure] = store.failures()
    assert (failure.rows, failure.reason) == (["router"], "it took longer than 480 s")


def test_kept_rows_replace_their_own_and_failures_are_added_once(tmp_path: Path) -> None:
    path = tmp_path / "fast_path.json"
    sheet = replace(FAST_PATH, path=path)
    failure = Failure(rows=["paced"], commit=COMMIT, ended="2026-11-23T10:00", reason="no quiet")
    sheet.keep([result("within", complete("within")), result("tiny_1", complete("tiny_1"))], [])
    sheet.keep([result("tiny_1", complete("tiny_1", 0.5), "d" * 40)], [failure])
    sheet.keep([], [failure])
    kept = sheet.load()
    assert kept.failures == [failure]
    assert list(json.loads(path.read_text())["results"]) == ["tiny_1", "within"], "in order"
    assert kept.results["tiny_1"].found["tiny_1"].values == [0.5]
    assert kept.results["within"].commit == COMMIT


def test_what_was_measured_with_small_shapes_is_never_kept(tmp_path: Path) -> None:
    sheet = replace(FAST_PATH, path=tmp_path / "fast_path.json")
    with pytest.raises(ValueError, match="small shapes"):
        sheet.keep([result("router", complete("router"), TRIAL)], [])
    assert not sheet.path.exists()


# ---------------------------------------------------------------- the table


def test_every_claim_has_one_line_in_order() -> None:
    ids = [cells.split('"')[1] for cells in FAST_PATH.table({})[2:]]
    assert ids == list(BY_ID)
    assert all(NOT_MEASURED in cells for cells in FAST_PATH.table({})[2:])


def test_the_document_is_what_the_kept_rows_make() -> None:
    place = FAST_PATH.place
    text = place.document.read_text()
    shown = FAST_PATH.written(FAST_PATH.load())
    assert text == place.filled(text, shown), "python -m bench.gpu FOLDER --keep"
    assert re.findall(r'^\| <a id="(\w+)"></a>', place.content(text), re.M) == list(BY_ID)


def test_a_line_says_everything() -> None:
    found = Found(
        values=[0.90, 0.99, 0.93], sides={"mlxsup": [900, 1100.0], "in process": [1.0, 1.0]},
        unit="tok/s", note="In a test",
    )  # fmt: skip
    cells = line(BY_ID["7b_16_whole"], result("7b_16", {"7b_16_whole": found}))
    assert cells[2:] == (
        "MLX, CUDA", "≥0.92", "0.93 (0.90 to 0.99). In a test",
        "mlxsup: 1,000 (900 to 1,100) tok/s; in process: 1 tok/s", "3", "`ccccccccc`", "kept",
    )  # fmt: skip
    missed = line(
        BY_ID["7b_16_whole"], result("7b_16", {"7b_16_whole": replace(found, values=[0])})
    )
    assert missed[-1] == "**MISSED**"


def test_many_runs_have_the_interval_of_their_median() -> None:
    many = Found(values=[value / 100 for value in range(90, 111)])
    text = "1.00 (0.90 to 1.10), 95 %: 0.95 to 1.05"
    assert figure_text(BY_ID["tiny_16"], many) == text
    assert figure_text(BY_ID["tiny_16"], Found(values=many.values[:8])) == "0.94 (0.90 to 0.97)"
    gaps = Found(values=[float(value) for value in range(1, 10)])
    assert figure_text(BY_ID["beside_tiny"], gaps) == "9 ms (1 ms to 9 ms)"


def test_no_side_is_cut_to_nothing() -> None:
    sides = {"a": [0.0123], "b": [12345.6], "c": [0.0]}
    assert (
        sides_text(Found(values=[1], sides=sides, unit="s")) == "a: 0.0123 s; b: 12,346 s; c: 0 s"
    )


def test_attempts_without_figures_are_listed_below_the_table() -> None:
    failure = Failure(rows=["paced"], commit=COMMIT, ended="2026-11-23T10:00", reason="no quiet")
    lines = FAST_PATH.written(
        Kept(results={"within": result("within", complete("within"))}), ["within"]
    )
    assert lines[-1] == "Measured on a machine."
    assert not any("Attempts" in text for text in lines)
    lines = FAST_PATH.written(Kept(failures=[failure]), ["paced"])
    assert lines[-1] == "- 2026-11-23T10:00, `ccccccccc`: paced: no quiet"


def test_a_document_without_its_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="markers"):
        FAST_PATH.place.filled("nothing", [])


# ---------------------------------------------------------------- rates that docs/sharing.md claims


def test_rates_of_equality_are_also_those_of_sharing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[sharing.Figure] = []
    monkeypatch.setattr("bench.gpu.shared.keep", kept.extend)
    monkeypatch.setattr("bench.gpu.shared.render", lambda: None)
    share({})
    assert kept == []
    rates = {"kept_greedy": 0.9, "dropped_greedy": 0.8, "kept_sampled": 0.7, "dropped_sampled": 0.6}
    found = {f"equality_{name}": Found(values=[rate]) for name, rate in rates.items()}
    share({"equality": result("equality", found)})
    about = [(one.claim, one.found.value, one.commit, one.machine) for one in kept]
    assert about == [
        ("bits_gpu_kept", 0.7, COMMIT, "a machine"),
        ("bits_gpu_dropped", 0.6, COMMIT, "a machine"),
    ]


def test_so_is_the_gap_next_to_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[sharing.Figure] = []
    monkeypatch.setattr("bench.gpu.shared.keep", kept.extend)
    monkeypatch.setattr("bench.gpu.shared.render", lambda: None)
    found = {
        "leases_gap": Found(values=[0.5, 0.9, 0.6], note="two of 03b"),
        "leases_answers": Found(values=[3.0]),
        "leases_first": Found(values=[2.0]),
    }
    share({"leases": result("leases", found)})
    [one] = kept
    about = (one.claim, one.found.value, one.runs, one.note, one.commit)
    assert about == ("leases_gap", 0.6, 3, "two of 03b", COMMIT)


def test_every_figure_of_a_gpu_in_sharing_has_a_row_that_measures_it() -> None:
    of_a_gpu = {claim.id for claim in SHARING_CLAIMS if claim.on == GPU}
    assert set(SHARED) == of_a_gpu
    assert all(claim in {one.id for one in ROWS[row].claims} for row, claim in SHARED.values())


def test_a_figure_that_names_its_commit_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sharing.json"
    monkeypatch.setattr(sharing, "clean_commit", lambda: "a" * 40)
    elsewhere = replace(sharing.figure("bits_gpu_kept", [0.7]), commit=COMMIT, machine="a GPU")
    sharing.keep([elsewhere, sharing.figure("jain", [0.97])], path)
    found = sharing.load(path)
    assert (found["bits_gpu_kept"].commit, found["bits_gpu_kept"].machine) == (COMMIT, "a GPU")
    assert found["jain"].commit == "a" * 40
