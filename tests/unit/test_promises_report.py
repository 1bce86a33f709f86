"""What `make promises` makes of what it has measured: verdicts, results of one commit, Markdown."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from promises import document, results
from promises.__main__ import exit_code, measure_all
from promises.bounds import (
    Bound,
    at_most,
    at_most_beside,
    at_most_share,
    equals,
    median_at_most,
    quantile_at_most,
)
from promises.campaigns import CAMPAIGNS, Campaign, Run, run_campaign
from promises.measure import SMALL, Figure, Measure, Outcome, Place, Sizes, Values
from promises.measures import MEASURES
from promises.report import figure_lines, gather, report, verdicts_of
from promises.results import Results, UncleanTreeError, clean_commit
from support.verdict import NotShown, Verdict

PROMISES = {f"P{number}" for number in range(1, 27)} | {"P29"}
KEPT, MISSED, NOT_SHOWN, REPORTED = (
    Verdict.KEPT,
    Verdict.MISSED,
    Verdict.NOT_SHOWN,
    Verdict.REPORTED,
)


def test_every_promise_has_its_measure_or_campaign() -> None:
    found = {measure.promise for measure in MEASURES}
    found |= {promise for campaign in CAMPAIGNS for promise in campaign.promises}
    assert found - {"P0"} == PROMISES


def test_no_two_rows_have_the_same_name() -> None:
    rows = [(measure.key, figure.key) for measure in MEASURES for figure in measure.figures]
    assert len(set(rows)) == len(rows)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("bound", "good", "bad", "text"),
    [
        (at_most(3.5), [0.1, 3.5], [0.1, 3.6], "≤3.5 s"),
        (equals(0), [0, 0], [0, 1], "0 s"),
        (median_at_most(2), [1, 2, 9], [1, 2.1, 9], "median ≤2 s"),
        (at_most_beside("base", "load", 1), [2, 3], [2, 3.1], "≤load + 1 s"),
        (at_most_share("base", "it", 0.5), [0.5, 1], [0.5, 1.1], "≤0.5 of it"),
        (quantile_at_most(0.5, 4, least=2), [4, 9], [5, 9], "p50 of ≥2 ≤4 s"),
    ],
)
def test_a_bound_tells_kept_from_missed_by_the_number_in_its_text(
    bound: Bound, good: list[float], bad: list[float], text: str
) -> None:
    samples = {"base": [1.0, 2.0]}
    assert bound.judge({**samples, "x": good}, "x") is KEPT
    assert bound.judge({**samples, "x": bad}, "x") is MISSED
    assert Figure(key="x", what="", bound=bound).target == text


def test_what_never_came_is_missed() -> None:
    assert at_most(1e9).judge({"x": [float("inf")]}, "x") is MISSED
    assert at_most(1e9).judge({"x": [float("nan")]}, "x") is MISSED


def test_a_quantile_of_too_few_samples_is_not_shown_P3() -> None:
    assert quantile_at_most(0.99, 50, least=500).judge({"x": [1.0] * 499}, "x") is NOT_SHOWN


# ---------------------------------------------------------------- outcomes


def measure_of(how: Callable[[Place], Values], *figures: Figure) -> Measure:
    """A measure that nothing is started for."""
    return Measure(promise="P13", name="x", where="x", round=how, figures=figures)


def measured(measure: Measure, tmp_path: Path, *, keep: list[int] | None = None) -> Outcome:
    """In two rounds at most."""
    outcome = Outcome(measure=measure)
    sizes = Sizes(repeats=2)
    kept = [] if keep is None else keep
    place = Place(sizes=sizes, tiny=tmp_path)
    measure_all([outcome], place, lambda known: kept.append(known.rounds))
    return outcome


JUDGED = Figure(key="x", what="judged", bound=equals(0))
ONLY_REPORTED = Figure(key="x", what="only reported")


def test_a_figure_without_a_target_is_reported_and_never_kept(tmp_path: Path) -> None:
    outcome = measured(measure_of(lambda _: {"x": 0}, JUDGED, ONLY_REPORTED), tmp_path)
    assert [outcome.verdict(one) for one in outcome.measure.figures] == [KEPT, REPORTED]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (AssertionError("a child is left"), MISSED),
        (ConnectionError("the daemon is gone"), MISSED),
        (NotShown("the fault never struck"), NOT_SHOWN),
        (OSError("no space left on device"), NOT_SHOWN),
    ],
)
def test_a_round_that_raises_is_named_and_not_tried_again(
    error: Exception, verdict: Verdict, tmp_path: Path
) -> None:
    def fail(_: Place) -> Values:
        raise error

    rounds: list[int] = []
    outcome = measured(measure_of(fail, JUDGED, ONLY_REPORTED), tmp_path, keep=rounds)
    assert [outcome.verdict(one) for one in outcome.measure.figures] == [verdict, verdict]
    assert str(error) in outcome.problem
    assert rounds == [0]


def test_what_a_round_did_not_measure_is_not_shown(tmp_path: Path) -> None:
    outcome = measured(measure_of(lambda _: {}, JUDGED), tmp_path)
    assert outcome.verdict(JUDGED) is NOT_SHOWN
    assert "not shown | 2 of 5" in figure_lines([outcome], Sizes())[-2]


def test_the_worst_verdict_decides_about_the_exit_code() -> None:
    assert exit_code([KEPT, REPORTED]) == 0
    assert exit_code([KEPT, NOT_SHOWN]) == 3
    assert exit_code([NOT_SHOWN, MISSED, KEPT]) == 4


# ---------------------------------------------------------------- results of one commit


def test_a_run_continues_with_the_rounds_that_are_due(tmp_path: Path) -> None:
    known = Results("c" * 40, tmp_path)
    counted: list[int] = []

    def count(_: Place) -> Values:
        counted.append(1)
        return {"x": 0}

    measure = measure_of(count, JUDGED)
    place = Place(sizes=Sizes(repeats=1), tiny=tmp_path)
    measure_all([known.load_outcome(measure)[0]], place, known.save_outcome)
    for _ in range(2):
        again = Place(sizes=Sizes(repeats=3), tiny=tmp_path)
        measure_all([known.load_outcome(measure)[0]], again, known.save_outcome)
    outcome, note = known.load_outcome(measure)
    assert (len(counted), outcome.rounds, outcome.samples) == (3, 3, {"x": [0, 0, 0]})
    assert note is not None
    assert Results("d" * 40, tmp_path).load_outcome(measure) == (Outcome(measure=measure), None)


def test_results_are_published_with_the_document() -> None:
    path = Results("c" * 40).path("simulation")
    assert path.is_relative_to(document.DOCUMENT.parent)


def test_what_was_not_run_at_this_commit_is_named_as_not_shown(tmp_path: Path) -> None:
    findings = gather(Results("c" * 40, tmp_path), MEASURES)
    assert set(verdicts_of(findings)) == {NOT_SHOWN}
    text = "\n".join(report("c" * 40, findings, SMALL))
    for campaign in CAMPAIGNS:
        assert f"{campaign.name}: not shown" in text
    assert "kept |" not in text


@pytest.mark.parametrize("campaign", [one for one in CAMPAIGNS if one.document])
def test_what_a_campaign_writes_besides_is_linked_once_it_ran(
    campaign: Campaign, tmp_path: Path
) -> None:
    known = Results("c" * 40, tmp_path)
    link = f"]({campaign.document})"
    assert link not in "\n".join(report("c" * 40, gather(known, MEASURES), SMALL))
    known.save_run(Run(campaign=campaign, verdict=KEPT, lines=("fine",), took_s=1.0))
    assert link in "\n".join(report("c" * 40, gather(known, MEASURES), SMALL))


def git(folder: Path, *arguments: str) -> None:
    """A command in a repository of the test's own."""
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one commit of code and documents."""
    (tmp_path / "docs").mkdir()
    text = f"before\n{document.BEGIN}\nold\n{document.END}\nafter\n"
    (tmp_path / "docs" / "reliability.md").write_text(text)
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_dirty_tree_is_refused(repository: Path, name: str) -> None:
    (repository / "docs" / "mutants.md").write_text("what a campaign writes")
    assert len(clean_commit()) == 40
    (repository / name).write_text("2")
    with pytest.raises(UncleanTreeError, match=name):
        clean_commit()


def test_figures_are_written_between_their_markers_only(repository: Path) -> None:
    commit, path = clean_commit(), repository / "docs" / "reliability.md"
    for lines in (["one"], ["two", ""]):
        document.write_figures(commit, lines, path)
    expected = f"before\n{document.BEGIN}\n\ntwo\n\n{document.END}\nafter\n"
    assert path.read_text() == expected
    (repository / "code.py").write_text("2")
    with pytest.raises(UncleanTreeError, match=r"code\.py"):
        document.write_figures(commit, ["three"], path)
    assert path.read_text() == expected


@pytest.mark.parametrize("text", ["", document.BEGIN, document.END, document.BEGIN * 2])
def test_a_document_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="markers"):
        document.with_figures(text, ["x"])


# ---------------------------------------------------------------- campaigns


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("print('0 violations')", KEPT),
        ("print('lost'); raise SystemExit(4)", MISSED),
        ("print('disk full'); raise SystemExit(3)", NOT_SHOWN),
        ("raise RuntimeError('planted')", NOT_SHOWN),
        ("import os; os.kill(os.getpid(), 9)", NOT_SHOWN),
    ],
)
def test_a_campaign_is_judged_by_its_exit_code(
    body: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_campaign.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    campaign = Campaign(promises=(), name="x", what="x", arguments=("planted_campaign",))
    run = run_campaign(campaign)
    assert run.verdict is verdict
    known = Results("c" * 40, tmp_path)
    known.save_run(run)
    assert known.load_run(campaign) is not None
    if "RuntimeError" in body:
        assert run.lines == ("exit code 1", "RuntimeError: planted")


def test_a_campaign_that_is_not_there_is_not_shown() -> None:
    run = run_campaign(Campaign(promises=(), name="x", what="x", arguments=("no_campaign",)))
    assert run.verdict is NOT_SHOWN
    assert run.lines[-1].endswith("No module named no_campaign")


@pytest.mark.parametrize(
    ("body", "verdict"),
    [("", KEPT), ("assert 0", MISSED), ("raise SystemExit(7)", NOT_SHOWN)],
)
def test_pytest_is_judged_by_its_own_exit_codes(
    body: str, verdict: Verdict, tmp_path: Path
) -> None:
    source = tmp_path / "test_planted.py"
    source.write_text(f"import pytest\ndef test_it():\n    {body or 'pass'}\n")
    if verdict is NOT_SHOWN:
        source.write_text("import nothing_of_this_name\n")
    arguments = ("pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(source))
    campaign = Campaign(promises=(), name="x", what="x", arguments=arguments, is_pytest=True)
    assert run_campaign(campaign).verdict is verdict
