"""How a download is started, and what it reports."""

from __future__ import annotations

import json
import sys

import pytest

from mlxsup.protocol.download import (
    MAX_SPEC_BYTES,
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    DownloadSpec,
    Repository,
    download_argv,
    read_report,
    report_line,
)

SPEC = DownloadSpec(repository=Repository("a/b", "v1"), parent_pid=7)
WORDS = "a download spec is one line of JSON"


def test_a_spec_is_one_line_and_is_read_again() -> None:
    line = SPEC.to_line()
    assert line == b'{"repository":{"repo":"a/b","revision":"v1"},"parent_pid":7}\n'
    assert DownloadSpec.from_line(line) == SPEC


def test_the_revision_is_main_unless_another_is_named() -> None:
    assert DownloadSpec.from_line(b'{"repository": {"repo": "a/b"}, "parent_pid": "7"}') == (
        DownloadSpec(repository=Repository("a/b", "main"), parent_pid=7)
    )
    assert (str(Repository("a/b")), str(Repository("a/b", "v1"))) == ("a/b", "a/b at v1")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"parent_pid": 7}',
        b'{"repository": {"repo": "a/b"}}',
        b'{"repository": {"name": "a/b"}, "parent_pid": 7}',
        b'{"repository": {"repo": "a/b"}, "parent_pid": "x"}',
        b"[" * 20_000,
        b" " * MAX_SPEC_BYTES + SPEC.to_line(),
    ],
)
def test_what_is_no_spec_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=f"^{WORDS}$"):
        DownloadSpec.from_line(line)


def test_as_many_bytes_of_a_spec_are_read_as_may_be_sent() -> None:
    line = SPEC.to_line().rstrip()
    assert DownloadSpec.from_line(b" " * (MAX_SPEC_BYTES - len(line)) + line) == SPEC
    assert MAX_SPEC_BYTES == 65_536


REPORTS: list[tuple[DownloadReport, dict[str, object]]] = [
    (
        DownloadProgress(done_bytes=3, total_bytes=9, is_waiting=True),
        {"mlxsup_download": "progress", "done_bytes": 3, "total_bytes": 9, "is_waiting": True},
    ),
    (
        DownloadDone(folder="/f", total_bytes=9, fetched_bytes=4),
        {"mlxsup_download": "done", "folder": "/f", "total_bytes": 9, "fetched_bytes": 4},
    ),
    (
        DownloadFailed(
            problem=DownloadProblem.RATE_LIMITED, message="m", hint="h", retry_after_s=2.5
        ),
        {
            "mlxsup_download": "failed",
            "problem": "rate_limited",
            "message": "m",
            "hint": "h",
            "retry_after_s": 2.5,
        },
    ),
]


@pytest.mark.parametrize(("report", "values"), REPORTS)
def test_a_report_is_one_line_and_is_read_again(
    report: DownloadReport, values: dict[str, object]
) -> None:
    line = report_line(report)
    assert json.loads(line) == values
    assert "\n" not in line
    found = read_report(line.encode())
    assert found == report
    if isinstance(found, DownloadFailed):
        assert isinstance(found.problem, DownloadProblem)


def test_a_report_may_leave_out_what_is_not_known() -> None:
    assert read_report(b'{"mlxsup_download": "progress"}') == DownloadProgress(
        done_bytes=0, total_bytes=0, is_waiting=False
    )
    short = b'{"mlxsup_download": "failed", "problem": "gated", "message": "m"}'
    assert read_report(short) == DownloadFailed(
        problem=DownloadProblem.GATED, message="m", hint="", retry_after_s=0.0
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Fetching 4 files",
        b"[]",
        b"3",
        b'{"done_bytes": 3}',
        b'{"mlxsup_download": "begun"}',
        b'{"mlxsup_download": "done", "folder": "/f"}',
        b'{"mlxsup_download": "progress", "speed": 3}',
        b'{"mlxsup_download": "failed", "problem": "new", "message": "m"}',
        b"[" * 20_000,
        b"\xff",
    ],
)
def test_any_other_line_is_none(line: bytes) -> None:
    assert read_report(line) is None


def test_problems_are_named_on_the_wire_as_the_documents_have_them() -> None:
    assert [problem.value for problem in DownloadProblem] == [
        "bad_repository", "not_found", "gated", "refused", "no_model", "offline", "disk_full",
        "unwritable", "damaged", "rate_limited", "network", "internal",
    ]  # fmt: skip


WAITS = {DownloadProblem.NETWORK: "the network", DownloadProblem.RATE_LIMITED: "the hub"}


@pytest.mark.parametrize("problem", DownloadProblem)
def test_another_attempt_may_help_after_an_outage_or_a_fault_of_the_download(
    problem: DownloadProblem,
) -> None:
    failed = DownloadFailed(problem=problem, message="m")
    assert failed.waits_for == WAITS.get(problem, "")
    assert failed.is_passing is (problem in WAITS or problem is DownloadProblem.INTERNAL)


def test_a_download_does_not_import_from_the_working_folder() -> None:
    assert download_argv("py") == ["py", "-P", "-m", "mlxsup.downloader"]
    assert download_argv()[0] == sys.executable
