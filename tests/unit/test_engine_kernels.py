"""The folder in which MLX for CUDA keeps the kernels of a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxsup.worker.engines.mlx.kernels import (
    FOLDER_NAME,
    MARK,
    VARIABLE,
    discard_if_unloadable,
    remove_damaged,
    use_kernel_folder,
)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


UNLOADABLE = (
    "Failed to load compiled binary_Add kernel: device kernel image is invalid.",
    "There is no kernel named mlx::core::cu::binary_vv.",
)


@pytest.fixture(autouse=True)
def no_folder_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    caplog.set_level("INFO", logger="mlxsup")


def write_kernel(folder: Path, name: str, *, without: str = "", empty: str = "") -> None:
    """As MLX does: the kernel, the names in it, its source."""
    for suffix in (".ptx", ".txt", ".cu"):
        if suffix != without:
            (folder / (name + suffix)).write_text("" if suffix == empty else "x")


def use(folder: Path, version: str = "0.32.4-sm_90") -> Path:
    use_kernel_folder(str(folder), model="m", version=version)
    return Path(os.environ[VARIABLE])


def test_kernels_are_kept_with_what_was_learned_and_those_of_other_versions_deleted(
    tmp_path: Path,
) -> None:
    folder = use(tmp_path / "m")
    assert folder == tmp_path / "m" / FOLDER_NAME / "0.32.4-sm_90"
    write_kernel(folder, "add")
    del os.environ[VARIABLE]
    assert use(tmp_path / "m") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["add.cu", "add.ptx", "add.txt", MARK]
    del os.environ[VARIABLE]
    assert use(tmp_path / "m", "2").is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("chosen", ["/somewhere/else", ""])
def test_the_users_own_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv(VARIABLE, chosen)
    use_kernel_folder(str(tmp_path), model="m", version="1")
    assert os.environ[VARIABLE] == chosen
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_keeps_nothing_leaves_it_to_mlx() -> None:
    use_kernel_folder(None, model="m", version="1")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "damage",
    [{"without": ".txt"}, {"without": ".cu"}, {"empty": ".ptx"}, {"empty": ".txt"},
     {"empty": ".cu"}],
)  # fmt: skip
def test_a_kernel_that_was_not_written_to_its_end_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: dict[str, str]
) -> None:
    """Its process was killed while it wrote, or the disk was full."""
    folder = use(tmp_path)
    write_kernel(folder, "whole")
    write_kernel(folder, "torn", **damage)
    del os.environ[VARIABLE]
    assert use(tmp_path) == folder
    assert [path.name for path in folder.glob("*.ptx")] == ["whole.ptx"]
    assert said(caplog) == [("WARNING", "damaged kernels deleted model=m kernels=1")]
    assert remove_damaged(folder) == 0


def test_a_folder_that_cannot_be_made_is_said_once_and_left_to_mlx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER_NAME).write_text("in the way")
    use_kernel_folder(str(tmp_path), model="m", version="1")
    assert VARIABLE not in os.environ
    ((level, line),) = said(caplog)
    assert level == "WARNING"
    assert line.startswith("compiled kernels not kept model=m cause=")


@pytest.mark.parametrize("text", UNLOADABLE)
def test_kernels_that_cannot_be_loaded_are_deleted_so_that_the_next_life_compiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    folder = use(tmp_path)
    write_kernel(folder, "add")
    discard_if_unloadable(RuntimeError(text))
    assert not folder.exists()
    assert said(caplog) == [("WARNING", f"unusable kernels deleted folder={folder}")]
    discard_if_unloadable(RuntimeError(text))
    assert len(said(caplog)) == 1


def test_a_folder_that_is_not_ours_is_never_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kernel(tmp_path, "add")
    for chosen in (str(tmp_path), ""):
        monkeypatch.setenv(VARIABLE, chosen)
        discard_if_unloadable(RuntimeError(UNLOADABLE[0]))
    assert len(list(tmp_path.iterdir())) == 3
