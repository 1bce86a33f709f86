"""The quick version of `make chaos` (P1): each kind of fault at least once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chaos.run import run_chaos
from chaos.setting import fake_setting, real_setting
from support.tiny_model import make_tiny_model


def test_the_ledger_reconciles_under_every_fault_P1() -> None:
    setting = replace(fake_setting(), pause_s=0.2)
    assert "the ledger reconciles" in run_chaos(setting, requests=300, seed=2)


@pytest.mark.mlx
def test_the_ledger_reconciles_on_real_mlx_P1(tmp_path: Path) -> None:
    kinds = ("SIGKILL", "SIGSEGV", "restart --now")
    setting = replace(real_setting(make_tiny_model(tmp_path / "tiny")), kinds=kinds)
    assert "the ledger reconciles" in run_chaos(setting, requests=40, seed=2)
