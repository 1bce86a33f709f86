"""docs/sharing.md has a row for each claim, and its figures are those of docs/sharing.json."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.claim import NOT_MEASURED
from bench.compare import ROWS
from bench.dispatch import MOST_GROWTH, WAITING
from bench.handle_cost import MOST
from bench.sharing import figures as kept
from bench.sharing.__main__ import measures
from bench.sharing.claims import CLAIMS
from bench.sharing.document import PLACE, row, table, written
from bench.sharing.figures import BY_ID, Figure, figure, load
from promises.results import UncleanTreeError
from support.verdict import Verdict

JAIN = BY_ID["jain"]


def test_every_claim_has_one_row_in_order() -> None:
    ids = re.findall(r'^\| <a id="(\w+)"></a>', PLACE.document.read_text(), re.M)
    assert ids == [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)


def test_the_document_is_what_the_figures_make() -> None:
    text = PLACE.document.read_text()
    assert text == PLACE.filled(text, written(load())), "python -m bench.sharing --render"


def test_a_figure_is_judged_by_the_limit_of_its_claim() -> None:
    limits = {claim.id: claim.limit for claim in CLAIMS if claim.limit is not None}
    assert len(limits) >= 15
    for id, limit in limits.items():
        worse = limit - 0.01 if BY_ID[id].is_least else limit + 0.01
        assert figure(id, [limit]).verdict is Verdict.KEPT
        assert figure(id, [worse]).verdict is Verdict.MISSED
        assert "**MISSED**" in row(BY_ID[id], figure(id, [worse]))
    assert figure("hit_rate", [0.0]).verdict is Verdict.REPORTED


def test_the_worst_run_or_the_median_stands_for_all() -> None:
    least = figure("jain", [0.99, 0.5, 0.98])
    assert (least.found.value, least.verdict) == (0.5, Verdict.MISSED)
    assert figure("bound", [0.2, 1.4, 0.3]).found.value == 1.4
    middle = figure("handle_16", [0.01, 0.5, 0.02], {"before": [0.0, 0.0, 0.0]})
    assert (middle.found.value, middle.found.high, middle.runs) == (0.02, 0.5, 3)


def test_a_claim_without_a_figure_says_so() -> None:
    assert NOT_MEASURED in row(JAIN, None)
    found = figure("jain", [0.96, 0.97], {"first come": [0.5, 0.6]}, note="Played")
    cells = row(JAIN, replace(found, commit="c" * 40))
    assert cells[4:] == (
        "0.960 (0.960 to 0.970). Played", "first come: 0.500 (0.500 to 0.600)", "2",
        "`ccccccccc`", "kept",
    )  # fmt: skip
    assert sum(NOT_MEASURED in line for line in table({"jain": found})) == len(CLAIMS) - 1


@pytest.mark.parametrize(
    ("claim", "target"),
    [
        ("weights", "≤5.0 %"),
        ("starved", "none"),
        ("interactive_first_token", "≤1.50, plus one step"),
        ("gives_back", "≤2.00 s"),
        ("hit_rate", "–"),
    ],
)
def test_targets_are_for_people(claim: str, target: str) -> None:
    assert BY_ID[claim].target == target


def test_figures_are_kept_with_the_commit_and_the_machine_and_replaced_by_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sharing.json"
    monkeypatch.setattr(kept, "clean_commit", lambda: "a" * 40)
    kept.keep([figure("jain", [0.9]), figure("bound", [0.4])], path)
    monkeypatch.setattr(kept, "clean_commit", lambda: "b" * 40)
    kept.keep([figure("jain", [0.97, 0.98], {"x": [0.1]})], path)
    found = load(path)
    assert list(json.loads(path.read_text())) == ["bound", "jain"], "in the order of the claims"
    assert (found["bound"].commit, found["jain"].commit) == ("a" * 40, "b" * 40)
    assert (found["jain"].runs, found["jain"].peers["x"].value) == (2, 0.1)
    assert all(isinstance(one, Figure) and one.machine for one in found.values())


def test_no_figure_is_kept_of_a_tree_that_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise UncleanTreeError("planted")

    monkeypatch.setattr(kept, "clean_commit", refuse)
    with pytest.raises(UncleanTreeError):
        kept.keep([figure("jain", [0.9])], tmp_path / "sharing.json")
    assert kept.finish([figure("jain", [0.9])], is_kept=True) == kept.UNCLEAN
    assert "not kept: planted" in capsys.readouterr().err
    assert not (tmp_path / "sharing.json").exists()


def test_a_document_without_its_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="markers"):
        PLACE.filled("nothing", [])


def test_benchmarks_and_claims_have_the_same_limits() -> None:
    assert {BY_ID[f"handle_{rows}"].limit for rows in ROWS} == {MOST}
    assert {BY_ID[f"dispatch_{waiting}"].limit for waiting in WAITING[1:]} == {MOST_GROWTH}


def test_every_measure_is_known_those_in_virtual_time_first() -> None:
    names = measures()
    assert names[:3] == ["virtual_hits", "virtual_order", "virtual_waits"]
    assert "cost" in names
    assert not {"figures", "__main__", "played"} & set(names)
